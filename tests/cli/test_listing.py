"""``list``: for machines a list of objects with ``name``; for people, something that names them all."""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Any

import pytest

from murmurate import agents
from murmurate.cli.listing import listing
from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.fabric import fabrics
from murmurate.launch import launchers
from murmurate.recipes import algorithms, pairs, recipe, recipe_names
from murmurate.strategies import strategies
from murmurate.worlds.registry import families, world_names
from short_runs import preflight

# some of each that a user knows by name; that none is missing, the folders themselves say
_KNOWN = {
    "recipes": {
        "cartpole-a2c",
        "cartpole-gala",
        "pong-dqn",
        "pong-apex-dqn",
        "space-invaders-gala",
        "hopper-a2c",
        "corpus-lda",
    },
    "worlds": {"cartpole", "pong", "space-invaders", "hopper", "table", "corpus"},
    "strategies": {"solo", "all-reduce", "local-sgd", "hogwild", "dpsgd", "gala", "push-sum"},
    "agents": {"a2c", "dqn"},
    "fabrics": {"simulated", "processes", "network"},
    "launchers": {"inline", "local", "ray", "torchrun"},
}
_FOLDERS = {
    "recipes": recipe_names,
    "worlds": lambda: {*world_names(), *(world for world, _ in pairs().values())},
    "strategies": strategies,
    "agents": lambda: [
        m.name.replace("_", "-") for m in pkgutil.iter_modules(agents.__path__) if _is_an_agents(m.name)
    ],
    "fabrics": fabrics,
    "launchers": launchers,
}


def _is_an_agents(module: str) -> bool:
    return module != "interface" and not module.startswith("_")


def _rows(what: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["list", what, "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


@pytest.mark.parametrize("what", _KNOWN)
def test_lists_are_objects_with_a_name(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _rows(what, capsys)
    assert isinstance(rows, list)
    names = [row["name"] for row in rows]
    assert names == sorted(_FOLDERS[what]())
    assert set(names) >= _KNOWN[what]
    for row in rows:
        assert all(value not in ("", None) or key == "paper" for key, value in row.items()), row


@pytest.mark.parametrize("what", ["strategies", "agents", "fabrics", "launchers"])
def test_people_see_every_name_at_the_beginning_of_a_line(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {row["name"] for row in _rows(what, capsys)}
    assert main(["list", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if line[:1].strip()} - {"name"} == names


def test_strategies_are_listed_with_their_fields_and_class(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in _rows("strategies", capsys)}
    assert rows["local-sgd"]["fields"]["period"] == 10
    module, _, name = rows["local-sgd"]["class"].rpartition(".")
    assert getattr(importlib.import_module(module), name) is strategies()["local-sgd"]
    assert main(["list", "strategies"]) == 0
    text = capsys.readouterr().out
    assert "period=10" in text
    assert "then replaced (murmurate train, local or ray)" in " ".join(text.split())  # no script does
    assert "murmurate.strategies.local_sgd.LocalSGD" in text


def test_people_see_every_algorithm_and_the_families_of_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "recipes"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 60
    assert {line.split()[0] for line in text.splitlines() if line.startswith("  ")} >= set(algorithms())
    for names in families().values():
        assert f"({len(names)})  " in text
        assert names[0] in text.split()


def test_people_see_every_world(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "worlds"]) == 0
    assert set(capsys.readouterr().out.split()) >= set(world_names())


def test_algorithms_are_listed_for_worlds_whose_actions_they_take() -> None:
    kinds = {row["name"]: row["actions"] for row in listing("worlds")}
    made = {row["algorithm"]: set[str]() for row in listing("recipes")}
    for row in listing("recipes"):
        made[row["algorithm"]].add(kinds[row["world"]])
    assert made["dqn"] == made["arm"] == {"discrete"}
    assert made["td3"] == made["mbpo"] == {"vector"}
    assert made["a2c"] == {"discrete", "vector"}
    assert made["lda"] == {"none"}


_NAMED = set(world_names())
_OF_SIMULATORS = sorted({algorithm for world, algorithm in pairs().values() if world in _NAMED})
_OF_SOME = {"mbpo", "memr"}  # of worlds with known terminations: others say so in a refusal of their own


@pytest.mark.parametrize("algorithm", _OF_SIMULATORS)
def test_a_listed_recipe_can_be_made_and_others_cannot(algorithm: str) -> None:
    """On one world of each kind of actions that opens quickly: the rest differs in what is observed."""
    for name in ("cartpole", "pendulum"):
        run = recipe(f"{name}-{algorithm}")
        if f"{name}-{algorithm}" in pairs():
            preflight(run)
        elif algorithm not in _OF_SOME:
            with pytest.raises(Refusal):
                preflight(run)


def test_recipes_are_of_worlds_and_algorithms_that_there_are() -> None:
    worlds = {row["name"] for row in listing("worlds")}
    rows = listing("recipes")
    assert {row["world"] for row in rows} == worlds
    assert all(row["name"] == f"{row['world']}-{row['algorithm']}" for row in rows)
    assert {"apex-dqn", "spo-dqn"} < {row["algorithm"] for row in rows if row["world"] == "acrobot"}


def test_recipes_are_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == _rows("recipes", capsys)


def test_an_unknown_list_is_refused() -> None:
    with pytest.raises(Refusal, match="Did you mean 'fabrics'"):
        listing("fabric")
