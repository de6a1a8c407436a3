"""The command line's frozen surface."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from murmurate.cli.main import _parser
from murmurate.cli.options import options
from murmurate.recipes import recipe
from murmurate.strategies import strategies

GOLDEN = Path(__file__).parents[1] / "golden" / "cli_surface.json"


def _surface() -> dict[str, Any]:
    verbs = dict(next(a for a in _parser()._actions if a.dest == "verb").choices or {})
    inner = next(a for a in verbs["topics"]._actions if a.dest == "inner").choices or {}
    verbs |= {f"topics {name}": parser for name, parser in dict(inner).items()}
    frozen = ("cartpole-gala", "pong-gala", "cartpole-a2c", "pong-a2c", "corpus-lda", "table-gmm")
    runs = {name: recipe(name) for name in frozen}
    cartpole = recipe("cartpole-gala")
    return {
        "verbs": {
            name: sorted(word for a in parser._actions for word in (a.option_strings or [a.dest]))
            for name, parser in verbs.items()
        },
        "recipes": {name: _fields(run) for name, run in runs.items()},
        "strategies": {
            name: {
                k: v
                for k, v in _fields(dataclasses.replace(cartpole, strategy=kind())).items()
                if k.startswith("strategy.")
            }
            for name, kind in strategies().items()
        },
    }


def _fields(run: Any) -> dict[str, Any]:
    return {
        option.name: {
            "type": option.type_name(),
            "default": list(option.value) if isinstance(option.value, tuple) else option.value,
        }
        for option in options(run)
    }


_PROMISE = (
    "The command line is a promise: scripts use its names and defaults. What is new needs nothing. If a name "
    "is to go, say so in CHANGELOG.md and run "
    "MURMURATE_GOLDEN=write python -m pytest tests/cli/test_cli_surface.py"
)


def test_what_was_promised_of_the_command_line_is_there() -> None:
    if os.environ.get("MURMURATE_GOLDEN") == "write":
        GOLDEN.write_text(json.dumps(_surface(), indent=1) + "\n")
    frozen, now = json.loads(GOLDEN.read_text()), _surface()
    for verb, words in frozen["verbs"].items():
        assert set(words) <= set(now["verbs"][verb]), f"{verb}: {_PROMISE}"
    for part in ("recipes", "strategies"):
        for name, fields in frozen[part].items():
            gone = {key: value for key, value in fields.items() if now[part][name].get(key) != value}
            assert not gone, f"{name}: {_PROMISE}"


def test_names_frozen_by_the_design_are_there() -> None:
    frozen = json.loads(GOLDEN.read_text())
    assert {"simulators", "checkpoint-every-env-steps", "stop-at-return"} <= frozen["recipes"][
        "pong-gala"
    ].keys()
    verbs = {"train", "resume", "eval", "report", "list", "bench", "doctor"}
    assert verbs <= frozen["verbs"].keys()
    assert frozen["recipes"]["pong-gala"]["replicas"]["default"] == 4
    assert frozen["recipes"]["pong-a2c"]["replicas"]["default"] == 1
    assert {"--episodes", "--video", "--json"} <= set(frozen["verbs"]["eval"])
