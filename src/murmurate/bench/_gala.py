"""The runs of ``gala-table`` and ``gala-sweep`` (see ``_resumable``), kept below ``GalaPlan.where``; and what
``actor-learners`` shares with them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, cast

from murmurate.bench._resumable import ResumableRun
from murmurate.errors import Refusal
from murmurate.ranges import PositiveInt
from murmurate.recipes import recipe

SIX_GAMES = ("beam-rider", "breakout", "pong", "qbert", "seaquest", "space-invaders")
METHODS = {"A2C": "all-reduce", "GALA-A2C": "gala"}  # the paper's name -> our strategy
NOMINAL_SIMULATORS = 16  # the recipe's learning rate is for this number, and Fig. 1a compares with it


def learning_rate(name: str, simulators: int) -> float:
    """The rate of the recipe ``name``, which grows with the square root of the number of simulators of all
    learners (the authors' own command has 0.0014 for 64, github.com/facebookresearch/gala)."""
    rate: float = cast(Any, recipe(name).learner).learning_rate
    return rate * math.sqrt(simulators / NOMINAL_SIMULATORS)


def share(simulators: int, processes: int) -> int:
    """The number of simulators of each process. Raises Refusal if they cannot have equally many."""
    if simulators % processes:
        raise Refusal(
            f"{processes} processes cannot have {simulators} simulators in equal parts. Use --simulators "
            f"{math.ceil(simulators / processes) * processes}."
        )
    return simulators // processes


@dataclasses.dataclass(frozen=True)
class GalaPlan:
    """Every method is trained once for each game, number of simulators and seed.

    seeds: number of seeds (0, 1, ...). env_steps: numbers of env steps of all learners together,
    ascending, at each of which a run is evaluated (the learning rate is constant, so a shorter run is the
    beginning of a longer one). simulators: numbers of simulators of all learners together. eval_episodes:
    whole games that each evaluated policy plays. where: the folder that keeps the runs.

    games: the games that are played. learners: number of learners of each run.
    """

    games: tuple[str, ...] = SIX_GAMES
    seeds: PositiveInt = 10
    env_steps: tuple[PositiveInt, ...] = (25_000_000, 40_000_000)
    learners: PositiveInt = 4
    simulators: tuple[PositiveInt, ...] = (64,)
    eval_episodes: PositiveInt = 10
    where: str = "runs/gala"


@dataclasses.dataclass(frozen=True)
class Job:
    """One run: a method on a game with one seed, up to the last of the plan's ``env_steps``."""

    game: str
    method: str
    simulators: int
    seed: int
    plan: GalaPlan

    @property
    def folder(self) -> Path:
        """Named by all that the training depends on, so that no plan reuses the run of a different plan."""
        plan, ends = self.plan, "-".join(map(str, self.plan.env_steps))
        each = share(self.simulators, plan.learners)
        setup = f"{self.game}-{METHODS[self.method]}-{plan.learners}x{each}"
        return Path(plan.where) / f"{setup}-to-{ends}-seed-{self.seed}"

    @property
    def label(self) -> str:
        return f"{self.game}, {self.method}, {self.simulators} simulators"

    @property
    def recipe(self) -> str:
        return f"{self.game}-a2c"

    def settings(self) -> tuple[str, ...]:
        """Options of ``murmurate train``, without the run's length and folder."""
        plan = self.plan
        return (
            "--strategy", METHODS[self.method],
            "--replicas", str(plan.learners),
            "--simulators", str(share(self.simulators, plan.learners)),
            "--seed", str(self.seed),
            "--agent.learning-rate", repr(learning_rate(self.recipe, self.simulators)),
            "--agent.learning-rate-end", "1",
            "--stop-at-return", "none",
            "--eval-episodes", str(plan.eval_episodes),
        )  # fmt: skip

    @property
    def run(self) -> ResumableRun:
        # Atari's games differ little in speed, and the speed of each would take long to measure
        speed_like = f"{self.method}, {self.simulators} simulators"
        return ResumableRun(
            self.recipe, self.settings(), self.seed, self.plan.env_steps, self.folder, self.label, speed_like
        )


def jobs(plan: GalaPlan) -> list[Job]:
    """All runs of a plan, seed by seed, so that an interrupted plan has runs for every row of the table."""
    return [
        Job(game, method, simulators, seed, plan)
        for seed in range(plan.seeds)
        for game in plan.games
        for simulators in plan.simulators
        for method in METHODS
    ]
