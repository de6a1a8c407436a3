"""What the pages of options and commands show: defaults of the classes, every world, no list twice."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from murmurate.cli.options import options
from murmurate.recipes import recipe
from murmurate.replay.config import ReplayConfig
from murmurate.sources.replay_source import ReplaySourceConfig
from murmurate.worlds import registry
from murmurate.worlds.own import OwnWorld

pytest.importorskip("sphinx", reason="extra docs")


@pytest.fixture(scope="module")
def extension() -> ModuleType:
    path = Path(__file__).parents[2] / "docs" / "_ext" / "command_line.py"
    spec = importlib.util.spec_from_file_location("command_line", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_defaults_are_those_of_the_class_and_not_of_a_recipe(extension: ModuleType) -> None:
    run = recipe("cartpole-dqn")
    assert run.source != ReplaySourceConfig()
    assert extension.with_defaults(run.source) == ReplaySourceConfig()
    assert extension.with_defaults(run.learner) == type(run.learner)()
    assert extension.with_defaults(run).source.replay == ReplayConfig()
    rows = {o.name: o.value for o in options(extension.with_defaults(run))}
    assert (rows["replay.capacity"], rows["replay.learning-starts"]) == (1_000_000, 20_000)
    assert (rows["checkpoint-every-env-steps"], rows["env-steps"]) == (250_000, None)


def test_the_page_of_worlds_has_every_family_and_own_environments(extension: ModuleType) -> None:
    shown = {type(world) for world in extension.worlds().values()}
    named = {type(registry.world(name)) for names in registry.families().values() for name in names}
    assert shown >= named | {OwnWorld}


def test_lists_of_a_runs_options_are_left_out_of_the_help(extension: ModuleType) -> None:
    own = "usage: x\n\noptions:\n  --out OUT\n\n"
    text = f"{own}where it runs:\n  --a\n\nthe agent, a2c:\n  --b\n\nA note."
    assert extension.without_run_lists(text) == f"{own}A note."
    resume = f"{own}what may change:\n  --a\n\nwhere it runs:\n  --b"
    assert extension.without_run_lists(resume) == resume


@pytest.mark.parametrize("verb", ["train", "simulate", "tune", "plan", "topics fit"])
def test_the_page_of_commands_does_not_repeat_the_options_of_a_run(extension: ModuleType, verb: str) -> None:
    shown = extension._help(verb.split())
    names = {option.name for option in options(recipe("cartpole-a2c"))} - {"minutes"}  # tune has its own
    assert "--strategy" in shown
    assert {name for name in names if f"--{name} " in shown} == set()
