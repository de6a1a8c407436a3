"""Every recipe gives a valid Run; every strategy can run it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from murmurate.cli.main import main
from murmurate.cli.options import change
from murmurate.errors import Refusal
from murmurate.recipes import algorithms, pairs, recipe, recipe_names
from murmurate.replica.vector import Replica
from murmurate.replicator.collectives import Group
from murmurate.strategies import strategies
from murmurate.training import checkpoint
from murmurate.training.members import build_learner
from murmurate.training.run import Run
from murmurate.worlds import dm_control
from short_runs import preflight, train
from smallest import recipe_of, smallest


def more_of_the_suite() -> set[str]:
    """Worlds of the DeepMind Control Suite (to compile one takes long) but for one of each domain, and one
    from pixels."""
    worlds = [dm_control.world(name) for name in dm_control.names()]
    usual = {each.domain: each for each in reversed(worlds) if not each.pixels}
    return {each.name for each in worlds} - {each.name for each in (*usual.values(), *worlds[1:2])}


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_recipe_resolves_and_its_run_stands(rest: bool) -> None:
    names, more = recipe_names(), more_of_the_suite()
    assert {f"cartpole-{a}" in names or recipe_of(a).recipe in names for a in algorithms()} == {True}
    assert len(names) > 2000, "over a hundred ALE games, with each algorithm"
    for name, (on, _) in pairs().items():
        if (on in more) == rest:
            run = recipe(name)
            run.validate()
            assert run.recipe == name
            assert run.world.name == on


@pytest.mark.parametrize("world", ["cartpole", "pendulum", "hopper", "pong", "space-invaders"])
@pytest.mark.parametrize("algorithm", ["a2c", "gala", "ppo"])
def test_preflight_of_the_shipped_recipes_passes(world: str, algorithm: str) -> None:
    preflight(recipe(f"{world}-{algorithm}"))


def test_the_defaults_that_the_design_promises() -> None:
    for world in ("cartpole", "pong", "hopper"):
        assert (recipe(f"{world}-a2c").strategy.name, recipe(f"{world}-a2c").replicas) == ("all-reduce", 1)
        assert (recipe(f"{world}-gala").strategy.name, recipe(f"{world}-gala").replicas) == ("gala", 4)
    atari = recipe("pong-a2c").learner
    assert (atari.learning_rate, atari.rmsprop_epsilon, atari.rmsprop_alpha) == (7e-4, 1e-5, 0.99)
    assert (atari.entropy_coefficient, atari.value_coefficient, atari.clip, atari.steps) == (
        0.01,
        0.5,
        0.5,
        5,
    )
    assert recipe("pong-a2c").source.simulators == 16


def test_the_settings_of_ppo_are_those_that_cleanrl_publishes() -> None:
    """Its vf_coef of 0.5 has a factor of one half before the squared error."""
    for world, simulators, expected in (
        ("cartpole", 4, (128, 4, 4, 0.2, 2.5e-4, 0.01, 500_000)),
        ("pong", 8, (128, 4, 4, 0.1, 2.5e-4, 0.01, 10_000_000)),
        ("pendulum", 1, (2048, 10, 32, 0.2, 3e-4, 0.0, 1_000_000)),
    ):
        run = recipe(f"{world}-ppo")
        c = run.learner
        found = (c.steps, c.epochs, c.minibatches, c.ratio_clip, c.learning_rate, c.entropy_coefficient)
        assert (*found, run.env_steps) == expected
        assert run.source.simulators == simulators
        assert c.value_clip == c.ratio_clip
        assert (c.discount, c.gae_lambda, c.value_coefficient, c.clip) == (0.99, 0.95, 0.25, 0.5)
        assert (c.learning_rate_end, c.adam_epsilon, c.normalize_advantages) == (0.0, 1e-5, True)
        assert c.normalize_observations == c.scale_rewards == (world == "pendulum")


def test_a_registered_environment_gets_what_suits_its_kind() -> None:
    """And one that has a name of ours gets what it gets by that name."""
    for algorithm in [a for a in algorithms() if recipe_of(a).world.unit == "env steps"]:
        one, other = recipe(f"cartpole-{algorithm}"), recipe(f"gym:CartPole-v1-{algorithm}")
        assert dataclasses.replace(other, recipe=one.recipe) == one
    gymnasium.register("Flickering-v0", Flickering)
    try:
        images = recipe("gym:Flickering-v0-a2c")
        assert images.learner == recipe("pong-a2c").learner
        preflight(images)
        assert recipe("gym:Flickering-v0-fqi").learner.n_step == 1
    finally:
        del gymnasium.registry["Flickering-v0"]
    with pytest.raises(Refusal, match="no world called 'acrobot-apex'"):
        recipe("acrobot-apex-apex-dqn")


class Flickering(gymnasium.Env):  # type: ignore[type-arg]
    observation_space = gymnasium.spaces.Box(0, 255, (40, 40, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)


_CORRIDOR = """
import gymnasium, numpy
class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 9, (1,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = 0
        return self.look(), {}
    def step(self, action):
        self.x += int(action)
        return self.look(), 1.0, self.x == 9, False, {}
    def look(self):
        return numpy.array([self.x], numpy.float32)
class Half(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward / 2
gymnasium.register("House/Corridor-v0", lambda **_: Half(Corridor()), max_episode_steps=8)
"""


def test_an_environment_of_the_users_own_is_trained_resumed_and_evaluated_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It never ends before its limit of 8 steps, and its wrapper halves what each is worth."""
    (tmp_path / "corridor_of_mine.py").write_text(_CORRIDOR)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    name, folder = "gym:corridor_of_mine:House/Corridor-v0-a2c", tmp_path / "run"
    short = ["--replicas", "2", "--simulators", "2", "--updates", "2", "--eval-episodes", "2"]
    assert main(["train", name, *short, "--env-steps", "none", "--out", str(folder)]) == 0
    assert json.loads((folder / "summary.json").read_text())["eval_return_mean"] == 4.0
    assert main(["resume", str(folder), "--updates", "4"]) == 0
    assert main(["eval", str(folder), "--episodes", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["eval_return_mean"] == 4.0
    assert main(["report", str(folder)]) == 0


@pytest.mark.parametrize("name", ["cartpole", "cartpole-", ""])
def test_names_that_are_no_recipe_are_refused(name: str) -> None:
    with pytest.raises(Refusal, match="murmurate list recipes"):
        recipe(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "folder-sn-gan",
            "The recipes of sn-gan: fashion-sn-gan, arrays-sn-gan, cifar10-sn-gan, cifar100-sn-gan.",
        ),
        ("corpsu-lda", "Did you mean corpus-lda?"),
        ("cartpole-gmm", "There is no recipe cartpole-gmm. The recipes of gmm: table-gmm."),
        ("pong-resnet18", "folder-resnet18, shards-resnet18."),
    ],
)
def test_algorithms_of_data_name_their_recipes(name: str, words: str) -> None:
    with pytest.raises(Refusal, match=re.escape(words)):
        recipe(name)


@pytest.mark.parametrize("name", ["-gala", "cartpole-gala-a2c", "nothing-gala"])
def test_worlds_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(Refusal, match="murmurate list worlds"):
        recipe(name)


def carried() -> list[Any]:
    """Every recipe with every strategy; what adds nothing to the others is slow.

    The test takes the recipe's own strategy away, so two recipes with one kind of learner differ by settings.
    By default each kind of learner meets each family of strategies (common rounds, a centre, peers), each
    recipe some strategy, and each strategy at least three kinds of learner.
    """
    kinds: dict[type, list[str]] = {}
    for algorithm in sorted(algorithms()):
        kinds.setdefault(type(recipe_of(algorithm).learner), []).append(algorithm)
    families: dict[tuple[bool, bool], list[str]] = {}
    for name, strategy in sorted(strategies().items()):
        families.setdefault((strategy().common_rounds, strategy.centre), []).append(name)
    usual = set()
    for k, alike in enumerate(kinds.values()):
        for n, family in zip(range(max(len(alike), len(families))), itertools.cycle(families.values())):
            usual.add((alike[n % len(alike)], family[(k + n // len(families)) % len(family)]))
    return [
        pytest.param(*case, marks=() if case in usual else pytest.mark.slow)
        for case in itertools.product(sorted(algorithms()), sorted(strategies()))
    ]


def needs_collectives(run: Run) -> bool:
    """Whether its learner cannot be built where there are no collectives among replicas."""

    def open_group() -> Group:
        raise Refusal("there are none")

    try:
        build_learner(run, 0, Replica, open_group)
    except Refusal:
        return True
    return False


@pytest.mark.parametrize(("algorithm", "strategy"), carried())
def test_every_strategy_carries_every_recipe(algorithm: str, strategy: str, tmp_path: Path) -> None:
    """Or refuses it, where its learner needs collectives and the replicas do not wait for one another."""
    run = dataclasses.replace(
        smallest(algorithm, tmp_path),
        strategy=strategies()[strategy](),
        replicas=1 if strategy == "solo" else 2,
    )
    updates = {"local-sgd": 10, "synchronous-elastic": 11}.get(strategy, 2)  # so that a round is among them
    a_batch = run.learner.updates(1)
    short = f"--launcher inline --updates {updates} --env-steps none"
    if run.world.unit == "env steps":
        short += " --simulators 2 --eval-episodes 1"
    if run.source.gives == "transitions":
        short += " --replay.learning-starts 50"
    if run.source.gives == "model":
        short += " --learning-starts 40 --rollouts.starts 64 --agent.policy.batch 16"
        short += " --agent.model.hidden 16 --agent.model.batch 16"
        short += " --agent.model.patience 1 --agent.model.improvement 0.9"
    if run.source.gives == "sequences":
        short += " --collect-env-steps 100"
    if hasattr(run.source, "actors"):  # actors are processes: tests/sources
        short += " --actors 0"
    run = change(run, short.split(), "")
    if needs_collectives(run) and not run.strategy.common_rounds:
        with pytest.raises(Refusal, match="collectives among its replicas"):
            train(run, tmp_path / "run")
        return
    finish = train(run, tmp_path / "run")
    assert finish.code == 0
    assert finish.summary["strategy"] == strategy
    assert finish.summary["updates"] == math.ceil(updates / a_batch) * a_batch
    assert checkpoint.parts(tmp_path / "run" / "checkpoints" / "last") == list(range(run.members))
