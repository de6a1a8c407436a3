"""The configuration of a learner's replay, and how it is opened."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

import torch

from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Range, UnitInterval
from murmurate.replay.frame_replay import DISCRETE, FrameReplay
from murmurate.replay.interface import Replay
from murmurate.replay.memory import in_folder, private
from murmurate.replay.priorities import Prioritized, SlotSampler, Uniform
from murmurate.replay.row_replay import RowReplay
from murmurate.replay.rows import Column
from murmurate.replay.segments import Segmented
from murmurate.spec import EnvSpec, Shapes, derive_seed

# for each slot: a leaf of the sum tree, a share of the nodes above it, a presence flag; or two numbers of a
# uniform replay
_SAMPLER_BYTES = 16


@dataclass(frozen=True)
class ReplayConfig:
    """The replay of one learner.

    capacity: transitions; a full replay overwrites the oldest. alpha: transitions are drawn in proportion to
        |error| ** alpha (Schaul et al. 2016); 0 is uniform. alpha_end: the final value of alpha, reached
        linearly over the run and applied to new errors; None: alpha is constant.
    beta: importance weights are (N P(i)) ** -beta divided by the greatest of the batch (of the latest batches
        of all learners where ``weights`` is ``all``). beta_end: the final value of beta, reached linearly
        over the run (in a run limited by time alone, beta is constant). epsilon: added to |error|.
    learning_starts: env steps of a learner before its first update.
    samples_per_insert: how often a transition is drawn on average; env steps and updates alternate to keep
        this ratio.
    fit_every: env steps in a row, followed by all updates they allow (fitted Q-iteration); 0: env steps and
        updates alternate as soon as the ratio allows.
    segments: number of equal parts of the capacity, filled in order, with separate priorities. Not for
        stacked images.
        segment_draws: ``each``: a batch has equally many draws from each segment; ``one``: a whole batch
        comes from one segment at random (Zhang 2022, section 3.2.3).
    weights: for several learners, each with its own replay (bank). ``own``: the weights of that replay alone
        (Zhang 2022, eq. 5.4, which takes the sums of all banks as equal); ``all``: the weights of a single
        replay that would hold the transitions of all banks.
    ahead: D, how many batches are drawn in advance, before the errors of the preceding batches are known
        (Zhang 2022, section 4.3.1); 0 draws none in advance.
    saved: whether checkpoints contain the replay, up to 7.1 GB for a million images; otherwise a resumed run
        starts with an empty one. ``resume`` may change it.
    folder: a folder on a disk for memory-mapped files that hold images and rows, for replays larger than
        memory; each learner uses a subfolder. None: in memory. ``resume`` may change it.
    images: where stacked images are stored: in the memory of the ``host``, or of the learner's ``device``, so
        that a GPU reads batches without a copy from the host. ``resume`` may change it.
    publish_every: the learner's updates between publications of its parameters to actors; for runs with
        actors.
    manager: what draws and updates priorities: ``host``, or the simulated hardware of ``murmurate fpga``,
        which takes about a millisecond for each draw (small replays).
    """

    capacity: PositiveInt = 1_000_000
    alpha: UnitInterval = 0.6
    alpha_end: UnitInterval | None = None
    beta: UnitInterval = 0.4
    beta_end: UnitInterval = 1.0
    epsilon: NonNegativeFloat = 1e-6
    learning_starts: NonNegativeInt = 20_000
    samples_per_insert: Annotated[float, Range(1e-3, 1e6)] = 8.0
    fit_every: NonNegativeInt = 0
    segments: PositiveInt = 1
    segment_draws: Literal["each", "one"] = "each"
    weights: Literal["own", "all"] = "own"
    ahead: NonNegativeInt = 0
    saved: bool = field(default=True, metadata={"place": True})
    folder: str | None = field(default=None, metadata={"place": True})
    images: Literal["host", "device"] = field(default="host", metadata={"place": True, "since": 5})
    publish_every: NonNegativeInt = 10
    manager: Literal["host", "fpga"] = field(default="host", metadata={"since": 5})

    def __post_init__(self) -> None:
        if self.folder:  # absolute, because a run may be resumed from another working directory
            object.__setattr__(self, "folder", os.path.abspath(self.folder))

    def validate(self, batch: int) -> None:
        """Raise Refusal for values that do not fit one another, or batches of ``batch``."""
        if self.fit_every and self.fit_every * self.ratio % batch:
            # the smallest number of steps that allows whole batches
            least = (batch / self.ratio).numerator
            raise Refusal(
                f"replay.fit_every is {self.fit_every}: at {self.samples_per_insert:g} samples per insert "
                f"that is no whole number of batches of {batch}. Use --replay.fit-every "
                f"{least * max(1, round(self.fit_every / least))}."
            )
        if self.fit_every > self.capacity:
            raise Refusal(
                f"replay.fit_every is {self.fit_every}, but only {self.capacity} transitions are kept: some "
                f"would be lost before the fit. Use --replay.capacity {self.fit_every}."
            )
        if self.capacity < batch:
            raise Refusal(
                f"replay.capacity is {self.capacity} and a batch is {batch}: none could be drawn. Use "
                f"--replay.capacity {100 * batch}."
            )
        self._validate_segments(batch)
        if self.manager == "fpga" and self.is_uniform:
            raise Refusal(
                "replay.manager is fpga, which draws by priority, and replay.alpha is 0. Use --replay.alpha "
                "0.6, or --replay.manager host."
            )
        if self.images == "device" and self.folder:
            raise Refusal(
                "replay.images is device, but with replay.folder images are kept in files. Use "
                "--replay.images host."
            )
        if self.learning_starts > self.capacity:
            raise Refusal(
                f"replay.learning_starts is {self.learning_starts}, more than the {self.capacity} that are "
                f"kept. Use --replay.learning-starts {self.capacity // 10}."
            )

    @property
    def ratio(self) -> Fraction:
        """``samples_per_insert`` as the fraction that is meant. The product of floats 50 * 4.64 is less than
        232, and a fit would be a batch short."""
        return Fraction(self.samples_per_insert).limit_denominator(10_000)

    @property
    def is_uniform(self) -> bool:
        """Whether priorities never matter."""
        return self.alpha == 0 and not self.alpha_end

    def _validate_segments(self, batch: int) -> None:
        if self.segments > self.capacity // batch:
            raise Refusal(
                f"replay.segments is {self.segments}: {self.capacity} transitions are too few for a batch of "
                f"{batch} in each segment. Use --replay.segments "
                f"{max(1, self.capacity // batch // 4)}."
            )
        if self.capacity % self.segments:
            raise Refusal(
                f"replay.capacity is {self.capacity} and does not divide into {self.segments} segments. Use "
                f"--replay.capacity {self.capacity - self.capacity % self.segments}."
            )
        if self.segments > 1 and self.weights == "all":
            raise Refusal(
                "replay.weights is all, which compares priorities of all learners, but each of several "
                "segments has priorities of its own. Use --replay.weights own, or --replay.segments 1."
            )

    def new_sampler(self, slots: int, seed: int, threads: int = 1) -> Prioritized | Uniform:
        """What draws from a replay, or from one of its segments, of ``slots``. A subclass may override it, in
        order to draw in another way.

        threads: number of threads of the sum tree's searches for large batches.
        """
        if self.is_uniform:
            return Uniform(slots, seed=seed)
        tree = None
        if self.manager == "fpga":
            from murmurate.replay._fpga_tree import FpgaTree

            tree = FpgaTree(slots, seed)
        return Prioritized(
            slots, alpha=self.alpha, epsilon=self.epsilon, seed=seed, threads=threads, tree=tree
        )

    def alpha_at(self, progress: float) -> float:
        """progress: fraction of the run that is complete, in [0, 1]."""
        return self.alpha if self.alpha_end is None else self.alpha + (self.alpha_end - self.alpha) * progress

    def beta_at(self, progress: float) -> float:
        """progress: fraction of the run that is complete, in [0, 1]."""
        return self.beta + (self.beta_end - self.beta) * progress

    def planned_updates(self, env_steps: float, batch: int) -> int:
        """Updates of a learner that takes ``env_steps`` env steps."""
        return int(self.ratio * self.learnable(int(env_steps)) / batch)

    def begun_anew(self, random_env_steps: int) -> tuple[int, int]:
        """(env steps, transitions drawn) that an empty replay counts as made in the middle of a run, so that
        it is drawn from as soon as it holds a batch.

        random_env_steps: env steps at the run's start whose actions are random.
        """
        env_steps = max(self.learning_starts, random_env_steps)
        return env_steps, int(self.ratio * self.learnable(env_steps))

    def learnable(self, env_steps: int) -> int:
        """How many of a learner's ``env_steps`` count towards updates: those after ``learning_starts``, in
        whole multiples of ``fit_every``."""
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
    """Memory of the full replay, in bytes. Raises Refusal if no batch could ever be drawn from it."""
    behaviour_bytes = 4 * sum(math.prod(shape) for shape in (behaviour or {}).values())
    vector_action_bytes = 4 * math.prod(spec.action_shape)
    # below, 64 bytes (32 for images) are for reward, discount, a discrete action and padding
    if not spec.stacked:
        observation_bytes = math.prod(spec.observation_shape) * spec.observation_dtype.itemsize
        return config.capacity * (
            2 * observation_bytes + vector_action_bytes + behaviour_bytes + 64 + _SAMPLER_BYTES
        )
    if config.segments > 1:
        raise Refusal(
            f"replay.segments is {config.segments}, but images are stored in one ring for each simulator, "
            "which has no segments. Use --replay.segments 1."
        )
    stack, shape = _image(spec)
    ring, window = config.capacity // simulators, stack + steps
    # the first stack of each episode also takes frames of the ring: half of it is reserved for these
    if ring < 2 * window or simulators * (ring - window) < 2 * batch:
        raise Refusal(
            f"replay.capacity is {config.capacity:,}: {ring} images for each of {simulators} simulators "
            f"are too few for a batch of {batch}. Use --replay.capacity {4 * simulators * (window + batch)}."
        )
    return simulators * (ring + window) * math.prod(shape) + config.capacity * (
        32 + vector_action_bytes + behaviour_bytes + _SAMPLER_BYTES
    )


def memory_bytes(config: ReplayConfig, store_bytes: int) -> int:
    """How many of the replay's ``store_bytes`` are in memory; the rest is in memory-mapped files, if any."""
    return config.capacity * _SAMPLER_BYTES if config.folder else store_bytes


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
    device: torch.device | None = None,
) -> Replay:
    """A ``FrameReplay`` where observations are stacks of images, a ``RowReplay`` elsewhere.

    steps, discount: n and gamma of the n-step returns. threads: number of threads of the sum tree's searches
    for large batches. rank: the learner's rank, for the name of its subfolder. behaviour: shapes of the
    tensors stored with each action. device: the learner's device, for images if ``config.images`` is device.

    Raises Refusal if there is not enough memory or disk, or if another replay uses the folder.
    """
    images = spec.stacked
    capacity = config.capacity // simulators * simulators if images else config.capacity
    sampler: SlotSampler = config.new_sampler(capacity, seed, threads)
    if config.segments > 1:
        size = capacity // config.segments
        seeds = [derive_seed(seed, "segment", k) for k in range(config.segments)]
        segments = [config.new_sampler(size, each, threads) for each in seeds]
        sampler = Segmented(segments, whole=config.segment_draws == "one", seed=seed)
    allocate = in_folder(Path(config.folder) / f"replica-{rank}") if config.folder else private
    action = DISCRETE if spec.actions else Column(spec.action_shape, torch.float32)
    if images:
        stack, shape = _image(spec)
        return FrameReplay(
            sampler,
            shape,
            simulators=simulators,
            stack=stack,
            steps=steps,
            discount=discount,
            allocate=allocate,
            action=action,
            behaviour=behaviour,
            device=device if config.images == "device" else None,
        )
    return RowReplay(
        sampler,
        Column(spec.observation_shape, spec.observation_dtype),
        action,
        simulators=simulators,
        steps=steps,
        discount=discount,
        allocate=allocate,
        behaviour=behaviour,
    )


def _image(spec: EnvSpec) -> tuple[int, tuple[int, ...]]:
    """(number of images in a stack, shape of an image: [H, W] or [C, H, W])."""
    channels, height, width = spec.observation_shape
    colours = () if spec.channels == 1 else (spec.channels,)
    return channels // spec.channels, (*colours, height, width)
