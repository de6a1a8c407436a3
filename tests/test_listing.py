"""``list``: for machines a list of objects with ``name``; for people, something that names them all."""

from __future__ import annotations

import json

import pytest

from murmurate.cli.listing import listing
from murmurate.cli.main import main
from murmurate.errors import Refusal

_KNOWN = {
    "recipes": {
        "cartpole-a2c",
        "cartpole-gala",
        "pong-a2c",
        "pong-gala",
        "space-invaders-gala",
        "hopper-a2c",
    },
    "strategies": {"solo", "all-reduce", "local-sgd", "hogwild", "gala"},
    "agents": {"a2c"},
    "fabrics": {"network", "simulated", "processes"},
    "launchers": {"inline", "local"},
}


@pytest.mark.parametrize("what", _KNOWN)
def test_lists_are_objects_with_a_name(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert isinstance(rows, list)
    names = [row["name"] for row in rows]
    assert names == sorted(set(names))
    assert set(names) >= _KNOWN[what]
    for row in rows:
        assert all(value not in ("", None) or key == "paper" for key, value in row.items()), row


@pytest.mark.parametrize("what", _KNOWN)
def test_people_see_every_name(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what]) == 0
    text = capsys.readouterr().out
    for name in _KNOWN[what]:
        assert (f"{name.rsplit('-', 1)[0]}-*" if what == "recipes" else name) in text


def test_recipes_are_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} >= _KNOWN["recipes"]


def test_an_unknown_list_is_refused() -> None:
    with pytest.raises(Refusal, match="Did you mean 'fabrics'"):
        listing("fabric")
