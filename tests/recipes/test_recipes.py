"""Every recipe resolves to a Run that stands; every strategy carries it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from murmurate.cli.options import change
from murmurate.datasets.generated import generate
from murmurate.datasets.reading import write
from murmurate.errors import Refusal
from murmurate.recipes import algorithms, recipe, recipe_names
from murmurate.strategies import strategies
from murmurate.training import checkpoint
from murmurate.worlds.registry import world_names
from short_runs import preflight, train


def test_every_recipe_resolves_and_its_run_stands() -> None:
    names = recipe_names()
    assert len(names) == len(world_names()) * (len(algorithms()) - 2) + 2  # of a corpus, and of a table
    assert len(names) > 200, "over a hundred ALE games, with each algorithm"
    for name in names:
        run = recipe(name)
        run.validate()
        assert run.recipe == name
        assert f"{run.world.name}-" == name[: len(run.world.name) + 1]


@pytest.mark.parametrize("world", ["cartpole", "pendulum", "hopper", "pong", "space-invaders"])
@pytest.mark.parametrize("algorithm", ["a2c", "gala"])
def test_preflight_of_the_shipped_recipes_passes(world: str, algorithm: str) -> None:
    preflight(recipe(f"{world}-{algorithm}"))


def test_the_defaults_that_the_design_promises() -> None:
    for world in ("cartpole", "pong", "hopper"):
        assert (recipe(f"{world}-a2c").strategy.name, recipe(f"{world}-a2c").replicas) == ("all-reduce", 1)
        assert (recipe(f"{world}-gala").strategy.name, recipe(f"{world}-gala").replicas) == ("gala", 4)
    atari = recipe("pong-a2c").agent
    assert (atari.learning_rate, atari.rmsprop_epsilon, atari.rmsprop_alpha) == (7e-4, 1e-5, 0.99)
    assert (atari.entropy_coefficient, atari.value_coefficient, atari.clip, atari.steps) == (
        0.01,
        0.5,
        0.5,
        5,
    )
    assert recipe("pong-a2c").simulators == 16


@pytest.mark.parametrize("name", ["cartpole", "cartpole-", "-gala", "", "cartpole-gala-a2c", "nothing-gala"])
def test_names_that_are_no_recipe_are_refused(name: str) -> None:
    with pytest.raises(Refusal, match="murmurate list recipes"):
        recipe(name)


@pytest.mark.parametrize("strategy", sorted(strategies()))
@pytest.mark.parametrize("algorithm", sorted(algorithms()))
def test_every_strategy_carries_every_recipe(algorithm: str, strategy: str, tmp_path: Path) -> None:
    run = dataclasses.replace(
        recipe(f"{ {'lda': 'corpus', 'gmm': 'table'}.get(algorithm, 'cartpole') }-{algorithm}"),
        strategy=strategies()[strategy](),
        replicas=1 if strategy == "solo" else 2,
    )
    updates = {"local-sgd": 10, "synchronous-elastic": 11}.get(strategy, 2)  # so that a round is among them
    short = f"--launcher inline --updates {updates} --env-steps none --simulators 2 --eval-episodes 1"
    if algorithm == "lda":
        corpus = tmp_path / "docword.small.txt"
        write(generate(documents=40, vocabulary=30, topics=2, mean_length=9, seed=0).corpus, corpus, "uci")
        short += f" --world.path {corpus} --agent.topics 3 --agent.batch 4"
    if algorithm == "gmm":
        np.save(tmp_path / "table.npy", np.random.default_rng(0).normal(size=(60, 2)))
        short += f" --world.path {tmp_path / 'table.npy'} --agent.components 3 --agent.batch 4"
    if run.replay is not None:
        short += (
            " --replay.learning-starts 50 --actors 0"  # actors are processes: tests/collect/test_acted.py
        )
    finish = train(change(run, short.split(), ""), tmp_path / "run")
    assert finish.code == 0
    assert finish.summary["strategy"] == strategy
    assert finish.summary["updates"] == updates
    assert checkpoint.parts(tmp_path / "run" / "checkpoints" / "last") == list(range(run.members))
