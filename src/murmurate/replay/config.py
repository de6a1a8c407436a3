"""``Replay`` as a part of a run: what a learner keeps, and how it draws from it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal

import torch

from murmurate.errors import Refusal
from murmurate.replay.frame_replay import FrameReplay
from murmurate.replay.interface import Replay
from murmurate.replay.memory import in_folder, private
from murmurate.replay.priorities import Chances, Prioritized, Uniform
from murmurate.replay.row_replay import RowReplay
from murmurate.replay.rows import Column
from murmurate.replay.segments import Segmented
from murmurate.spec import EnvSpec, Shapes, derive_seed

_CHANCE_BYTES = 10  # of a leaf of the tree, what lies above it, and whether it is there


@dataclass(frozen=True)
class ReplayConfig:
    """What one learner keeps.

    capacity: transitions; the oldest makes room. alpha: a transition is drawn in proportion to |error| **
        alpha (Schaul et al. 2016); 0 draws all alike. alpha_end: what alpha becomes, linearly over the run,
        for errors as they come; None: it stays.
    beta: importance weights are (N P(i)) ** -beta over the greatest of a batch (of the last ones of all
        banks, where ``weights`` is ``all``). beta_end: what beta rises to, linearly over the run (where only
        time ends it, it does not). epsilon: added to each |error|.
    learning_starts: env steps of a learner before its first update.
    samples_per_insert: how often a transition is drawn on average; a learner plays or updates, whichever is
        behind.
    fit_every: env steps of a learner that are played in a row; the updates that they allow follow in a row
        too (fitted Q-iteration). 0 plays and learns in turn.
    segments: equal parts of the capacity, filled in order; each batch draws from all of them alike, each of
        which has priorities of its own. For rows. segment_draws: ``each``: so; ``one``: a whole batch from a
        segment at random (Zhang, section 3.2.3).
    weights: of several learners with a replay each. ``own``: as if its own were all there is (Zhang, eq. 5.4,
        where all banks' sums are taken for equal); ``all``: as if all drew from one.
    ahead: D, batches that are drawn before the errors of those before them are known (Zhang, section 4.3.1);
        0 waits for them.
    saved: whether checkpoints hold it, up to 7.1 GB for a million images; without, a resumed run begins with
        an empty one. ``resume`` may change it.
    folder: on a disk, where images and rows lie in mapped files instead of memory, each learner's in a folder
        of its own: for more than memory holds. None: in memory. ``resume`` may change it.
    publish_every: own updates after which actors are shown the parameters; for runs that have actors.
    """

    capacity: int = 1_000_000
    alpha: float = 0.6
    alpha_end: float | None = None
    beta: float = 0.4
    beta_end: float = 1.0
    epsilon: float = 1e-6
    learning_starts: int = 20_000
    samples_per_insert: float = 8.0
    fit_every: int = 0
    segments: int = 1
    segment_draws: Literal["each", "one"] = "each"
    weights: Literal["own", "all"] = "own"
    ahead: int = 0
    saved: bool = field(default=True, metadata={"place": True})
    folder: str | None = field(default=None, metadata={"place": True})
    publish_every: int = 10

    def __post_init__(self) -> None:
        if self.folder:  # a run goes on from elsewhere too
            object.__setattr__(self, "folder", os.path.abspath(self.folder))

    def validate(self, batch: int) -> None:
        """Raise Refusal for values that make no sense, for batches of ``batch``."""
        if batch < 1:
            raise Refusal(f"agent.batch is {batch}; a batch is of at least one. Use --agent.batch 32.")
        if not 0 < self.samples_per_insert < math.inf:
            raise Refusal(
                f"replay.samples_per_insert is {self.samples_per_insert}; who draws nothing learns "
                "nothing. Use --replay.samples-per-insert 8."
            )
        for name in ("alpha", "alpha_end", "beta", "beta_end"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise Refusal(f"replay.{name} is {getattr(self, name)}; it lies between 0 and 1.")
        for name in ("epsilon", "fit_every", "ahead", "learning_starts", "publish_every"):
            if not getattr(self, name) >= 0:
                raise Refusal(f"replay.{name} is {getattr(self, name)}; it is not negative.")
        if self.fit_every and self.fit_every * self.samples_per_insert % batch:
            # the least number of steps that allows whole batches
            least = (batch / Fraction(self.samples_per_insert).limit_denominator(10_000)).numerator
            raise Refusal(
                f"replay.fit_every is {self.fit_every}: at {self.samples_per_insert:g} samples per insert "
                f"that is no whole number of batches of {batch}. Use --replay.fit-every "
                f"{least * max(1, round(self.fit_every / least))}."
            )
        if self.fit_every > self.capacity:
            raise Refusal(
                f"replay.fit_every is {self.fit_every} and only {self.capacity} are kept: some would be lost "
                f"before the fit. Use --replay.capacity {self.fit_every}."
            )
        if self.capacity < batch:
            raise Refusal(
                f"replay.capacity is {self.capacity} and a batch is {batch}: it would never be full. Use "
                f"--replay.capacity {100 * batch}."
            )
        self._validate_segments(batch)
        if self.learning_starts > self.capacity:
            raise Refusal(
                f"replay.learning_starts is {self.learning_starts}, more than the {self.capacity} that are "
                f"kept. Use --replay.learning-starts {self.capacity // 10}."
            )

    def _validate_segments(self, batch: int) -> None:
        if not 1 <= self.segments <= self.capacity // batch:
            raise Refusal(
                f"replay.segments is {self.segments}: there is at least one, and each holds a batch of "
                f"{batch} of the {self.capacity} that are kept. Use --replay.segments "
                f"{max(1, self.capacity // batch // 4)}."
            )
        if self.capacity % self.segments:
            raise Refusal(
                f"replay.capacity is {self.capacity} and does not divide into {self.segments} segments. Use "
                f"--replay.capacity {self.capacity - self.capacity % self.segments}."
            )
        if self.segments > 1 and self.weights == "all":
            raise Refusal(
                "replay.weights is all: banks are compared by their priorities, and each of several segments "
                "has its own. Use --replay.weights own, or --replay.segments 1."
            )

    def alpha_at(self, progress: float) -> float:
        """progress: share of the run that lies behind, in [0, 1]."""
        return self.alpha if self.alpha_end is None else self.alpha + (self.alpha_end - self.alpha) * progress

    def beta_at(self, progress: float) -> float:
        """progress: share of the run that lies behind, in [0, 1]."""
        return self.beta + (self.beta_end - self.beta) * progress

    def planned_updates(self, env_steps: float, batch: int) -> int:
        """Updates of a learner that makes so many env steps."""
        return int(self.learnable(int(env_steps)) * self.samples_per_insert / batch)

    def learnable(self, env_steps: int) -> int:
        """Of so many steps of a learner, those that have been learned from once it has caught up."""
        steps = max(0, env_steps - self.learning_starts)
        return steps - steps % self.fit_every if self.fit_every else steps


def replay_bytes(
    config: ReplayConfig,
    spec: EnvSpec,
    *,
    simulators: int,
    steps: int,
    batch: int,
    behaviour: Shapes | None = None,
) -> int:
    """How much memory the store takes once it is full.

    Raises Refusal if no batch could ever be drawn from it.
    """
    recorded = 4 * sum(math.prod(shape) for shape in (behaviour or {}).values())
    if not spec.stacked:
        seen = math.prod(spec.observation_shape) * spec.observation_dtype.itemsize
        return config.capacity * (2 * seen + 4 * math.prod(spec.action_shape) + recorded + 64 + _CHANCE_BYTES)
    if config.segments > 1:
        raise Refusal(
            f"replay.segments is {config.segments}, and images lie in a ring for each simulator, not in one "
            "that could be divided. Use --replay.segments 1."
        )
    stack, *shape = spec.observation_shape
    ring, window = config.capacity // simulators, stack + steps
    # the beginnings of episodes take room too, a stack each: half is left for them
    if ring < 2 * window or simulators * (ring - window) < 2 * batch:
        raise Refusal(
            f"replay.capacity is {config.capacity:,}: {ring} images for each of {simulators} simulators "
            f"never hold a batch of {batch}. Use --replay.capacity {4 * simulators * (window + batch)}."
        )
    return simulators * (ring + window) * math.prod(shape) + config.capacity * (32 + recorded + _CHANCE_BYTES)


def memory_bytes(config: ReplayConfig, store_bytes: int) -> int:
    """Of a store of so many, those that are in memory for good."""
    return config.capacity * _CHANCE_BYTES if config.folder else store_bytes


def open_replay(
    config: ReplayConfig,
    spec: EnvSpec,
    *,
    simulators: int,
    steps: int,
    discount: float,
    seed: int,
    threads: int = 1,
    rank: int = 0,
    behaviour: Shapes | None = None,
) -> Replay:
    """The store for what is seen and done in a world: frames once each where observations are stacks of
    images, rows elsewhere. steps, discount: of the returns. threads: of searches for large batches.
    rank: whose it is, where it lies in a folder. behaviour: shapes of what is recorded beside the action.

    Raises Refusal if there is no memory for it.
    """
    images = spec.stacked
    capacity = config.capacity // simulators * simulators if images else config.capacity

    def chances_of(slots: int, seed: int) -> Prioritized | Uniform:
        if config.alpha == 0 and not config.alpha_end:
            return Uniform(slots, seed=seed)
        return Prioritized(slots, alpha=config.alpha, epsilon=config.epsilon, seed=seed, threads=threads)

    chances: Chances = chances_of(capacity, seed)
    if config.segments > 1:
        size = capacity // config.segments
        segments = [chances_of(size, derive_seed(seed, "segment", k)) for k in range(config.segments)]
        chances = Segmented(segments, whole=config.segment_draws == "one", seed=seed)
    take = in_folder(Path(config.folder) / f"replica-{rank}") if config.folder else private
    if images:
        stack, *shape = spec.observation_shape
        return FrameReplay(
            chances,
            tuple(shape),
            simulators=simulators,
            stack=stack,
            steps=steps,
            discount=discount,
            take=take,
            behaviour=behaviour,
        )
    action = Column((), torch.int64) if spec.actions else Column(spec.action_shape, torch.float32)
    return RowReplay(
        chances,
        Column(spec.observation_shape, spec.observation_dtype),
        action,
        simulators=simulators,
        steps=steps,
        discount=discount,
        take=take,
        behaviour=behaviour,
    )
