"""A recipe on small data of its own, for tests that go through all recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from murmurate.datasets.generated import generate
from murmurate.datasets.writing import write
from murmurate.recipes import pairs, recipe
from murmurate.training.run import Run
from pictures import drawn, write_cifar10, write_fashion


def _documents(folder: Path) -> str:
    path = folder / "docword.small.txt"
    write(generate(documents=60, vocabulary=30, topics=2, mean_length=9, seed=0).corpus, path, "uci")
    return str(path)


def _rows(folder: Path) -> str:
    np.save(folder / "table.npy", np.random.default_rng(0).normal(size=(60, 2)))
    return str(folder / "table.npy")


def _images(folder: Path) -> str:
    np.savez(folder / "images.npz", images=drawn(40, 8, 8, 3), labels=np.arange(40) % 4)
    return str(folder / "images.npz")


# by the name of a world
DATA: dict[str, Callable[[Path], str]] = {
    "corpus": _documents,
    "table": _rows,
    "arrays": _images,
    "fashion": write_fashion,
    "cifar10": write_cifar10,
}

SMALL = {"batch": 4, "channels": 4, "width": 4}  # of the learner, where it has such a field


def recipe_of(algorithm: str) -> Run:
    """On cartpole or pendulum, or on the first world of a recipe that is for neither."""
    worlds = [world for world, other in pairs().values() if other == algorithm]
    plain = [world for world in ("cartpole", "pendulum") if world in worlds]
    return recipe(f"{[*plain, *worlds][0]}-{algorithm}")


def smallest(algorithm: str, folder: Path) -> Run:
    """``recipe_of``; what learns from a file of examples gets one, and is small itself."""
    run = recipe_of(algorithm)
    if run.world.name not in DATA:
        return run
    small = {name: value for name, value in SMALL.items() if hasattr(run.learner, name)}
    held_out = {"test": 0.2} if hasattr(run.world, "test") else {"validation": 0.2}
    few = {"samples": 20} if hasattr(run.evaluation, "samples") else {}
    return dataclasses.replace(
        run,
        world=dataclasses.replace(run.world, path=DATA[run.world.name](folder), **held_out),
        learner=dataclasses.replace(run.learner, **small),
        evaluation=dataclasses.replace(run.evaluation, **few),
    )
