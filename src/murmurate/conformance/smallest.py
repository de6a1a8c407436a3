"""Small versions of recipes: with generated data, few simulators and a small replay."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from murmurate.datasets.generated import generate
from murmurate.datasets.writing import write
from murmurate.recipes import pairs, recipe
from murmurate.training.run import Run


def _documents(folder: Path) -> str:
    path = folder / "docword.small.txt"
    write(generate(documents=60, vocabulary=30, topics=2, mean_length=9, seed=0).corpus, path, "uci")
    return str(path)


def _rows(folder: Path) -> str:
    np.save(folder / "table.npy", np.random.default_rng(0).normal(size=(60, 2)))
    return str(folder / "table.npy")


def _images(folder: Path) -> str:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images, labels=np.arange(40) % 4)
    return str(folder / "images.npz")


# by the name of a world whose data are files: a function that writes small files and returns their path
DATA: dict[str, Callable[[Path], str]] = {
    "corpus": _documents,
    "table": _rows,
    "arrays": _images,
}

SMALL = {"batch": 4, "channels": 4, "width": 4}  # fields of those learners that have them


@functools.cache
def recipe_of(algorithm: str) -> Run:
    """The recipe on cartpole or pendulum, or, if it is for neither, on its first world."""
    worlds = [world for world, other in pairs().values() if other == algorithm]
    preferred = [world for world in ("cartpole", "pendulum") if world in worlds]
    return recipe(f"{[*preferred, *worlds][0]}-{algorithm}")


def smallest(algorithm: str, folder: Path) -> Run:
    """``recipe_of``; if it learns from files, small files are generated, a fifth of them is held out, and
    the learner and its evaluation are small too."""
    run = recipe_of(algorithm)
    if run.world.name not in DATA:
        return run
    small = {name: value for name, value in SMALL.items() if hasattr(run.learner, name)}
    world: Any = run.world
    held_out = {"test": 0.2} if hasattr(run.world, "test") else {"validation": 0.2}
    fewer = {"samples": 20} if hasattr(run.evaluation, "samples") else {}
    return dataclasses.replace(
        run,
        world=dataclasses.replace(world, path=DATA[run.world.name](folder), **held_out),
        learner=dataclasses.replace(run.learner, **small),
        evaluation=dataclasses.replace(run.evaluation, **fewer),
    )


def altered(run: Run, **fields: Any) -> Run:
    """``dataclasses.replace`` that also replaces fields of the source and of the evaluation."""
    for part in ("source", "evaluation"):
        value = getattr(run, part)
        names = {f.name for f in dataclasses.fields(value)} & fields.keys()
        run = dataclasses.replace(
            run, **{part: dataclasses.replace(value, **{n: fields.pop(n) for n in names})}
        )
    return dataclasses.replace(run, **fields)


def shortest(algorithm: str, folder: Path) -> Run:
    """``smallest`` for one replica, 3,000 env steps and a small replay or model, without actor processes
    (which the tests of the sources cover)."""
    run = smallest(algorithm, folder)
    source: dict[str, Any] = {"simulators": 2} if run.world.unit == "env steps" else {}
    source = {name: value for name, value in source.items() if hasattr(run.source, name)}
    if hasattr(run.source, "actors"):
        source["actors"] = 0
    if run.source.gives == "transitions" and hasattr(run.source, "replay"):
        replay = dataclasses.replace(
            run.source.replay, capacity=600, learning_starts=40, fit_every=0, weights="own"
        )
        source["replay"] = replay
    if hasattr(run.source, "collect_env_steps"):
        source["collect_env_steps"] = 200
    if run.source.gives == "model":
        run, source = _with_small_model(run, source)
    return altered(run, env_steps=3_000, replicas=1, **source)


def _with_small_model(run: Run, source: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    """``run`` with a small model, and ``source``, the fields of its source, with those by which the model is
    fitted, for a few epochs, at every second env step."""
    if not hasattr(run.learner, "model"):
        return run, source
    learner_config: Any = run.learner
    source_config: Any = run.source
    learner = dataclasses.replace(
        learner_config,
        policy=dataclasses.replace(learner_config.policy, batch=16, hidden=16),
        model=dataclasses.replace(
            learner_config.model, members=3, elites=2, hidden=16, batch=16, patience=1, improvement=0.9
        ),
    )
    rollouts = dataclasses.replace(source_config.rollouts, every=1, starts=32, kept=3)
    small = {"learning_starts": 40, "fit_every": 2, "updates_per_step": 1.0, "rollouts": rollouts}
    return dataclasses.replace(run, learner=learner), source | small
