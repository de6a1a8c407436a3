"""The data types that worlds, sources, learners and strategies exchange.

Letters in shapes: ``T`` steps of a rollout, ``B`` simulators, ``A`` actions, ``N`` parameters
(``docs/notation.md`` has the whole table).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from murmurate.ranges import Range

_MOST_JOINED = 65_536  # combinations of an action's parts that a message advises to join
Metric = Tensor | float | Callable[[], Tensor | float]


@dataclass(frozen=True)
class EnvSpec:
    """The static description of a world: what a learner is built from.

    ``actions`` is the number of discrete actions, or 0 where actions are vectors of shape ``action_shape``.
    Their bounds ``action_low`` and ``action_high`` have one number for each of its dimensions, in row-major
    order; by default -1 and 1. ``stacked``: an observation is the last few images of its episode, the newest
    last (at its beginning the first image is repeated): [stack * channels, H, W], each image of ``channels``
    channels. ``examples``: the size of a data set; 0 for simulators. ``factors``: where an action is a vector
    of whole numbers, each chosen for itself, how many values each has (from 0); else empty. ``history``: of
    vectors, how many observations of the episode are in one, the newest last.

    Raises ``ValueError`` for a wrong number of bounds, and channels that do not divide those of a stack.
    """

    name: str
    observation_shape: tuple[int, ...]
    observation_dtype: torch.dtype
    actions: int
    action_shape: tuple[int, ...] = ()
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    frames_per_step: int = 1
    stacked: bool = False
    channels: int = 1
    examples: int = 0
    factors: tuple[int, ...] = ()
    history: int = 1

    def __post_init__(self) -> None:
        dimensions = math.prod(self.action_shape) if self.action_shape else 0
        for name, default in (("action_low", -1.0), ("action_high", 1.0)):
            bounds = getattr(self, name) or (default,) * dimensions
            if len(bounds) != dimensions:
                raise ValueError(f"{name} has {len(bounds)} bounds for {dimensions} dimensions of an action")
            object.__setattr__(self, name, bounds)
        if self.stacked and self.observation_shape[0] % self.channels:
            raise ValueError(f"{self.observation_shape[0]} channels are no images of {self.channels}")

    @property
    def images(self) -> bool:
        """Whether observations are images [C, H, W] in uint8."""
        return len(self.observation_shape) == 3 and self.observation_dtype == torch.uint8

    @property
    def categorical(self) -> bool:
        """Whether actions are discrete: one number, or several chosen each for itself (``factors``)."""
        return bool(self.actions or self.factors)

    def refuse_factors(self, agent: str) -> None:
        """Raise ValueError where an action has several parts chosen each for itself."""
        if self.factors:
            total = math.prod(self.factors)
            joined = f", or --world.joint-actions {total}" if total <= _MOST_JOINED else ""
            raise ValueError(
                f"an action of {self.name} has {len(self.factors)} parts of {min(self.factors)} to "
                f"{max(self.factors)} values, which are {total:,} combinations, and {agent} needs one "
                f"number: use a2c or ppo{joined}"
            )


@dataclass(frozen=True)
class Episode:
    """A finished episode (in Atari a whole game): unclipped return, length in env steps, simulator index.

    success: whether it reached the task's goal, where the world says so; not passed on by actors.
    """

    simulator: int
    episode_return: float
    length: int
    success: bool | None = None


@dataclass
class TimeStep:
    """What ``B`` simulators return for one action each (or for a reset).

    Simulators reset within the step that ends an episode: ``observation`` is then the first of the
    next one. ``reward`` is what the agent learns from (clipped or scaled where the world is configured so);
    ``episodes`` have the returns of what the game gave. ``restarts``: a sentence for each simulator that was
    replaced because it failed; its episode ends truncated and is not among ``episodes``.
    """

    observation: Tensor  # [B, ...]
    reward: Tensor  # [B] float32
    terminated: Tensor  # [B] bool
    truncated: Tensor  # [B] bool
    # [B, ...]; rows valid where truncated, and of vectors also where terminated; None if nowhere
    final_observation: Tensor | None = None
    episodes: Sequence[Episode] = ()
    restarts: Sequence[str] = ()


@dataclass
class Trajectory:
    """``T`` steps of ``B`` simulators, time-major, with what is needed to bootstrap at its end."""

    observation: Tensor  # [T, B, ...]
    action: Tensor  # [T, B] int64, or [T, B, D] float32
    reward: Tensor  # [T, B] float32
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool
    first: Tensor  # [T, B] bool: observation t begins an episode
    last_observation: Tensor  # [B, ...]: after step T
    truncated_observation: Tensor | None = None  # [K, ...]: one row per True in truncated, row-major
    memory: Tensor | None = None  # [B, M]: recurrent state before step 0
    # [T, B, ...] by name: what the agent recorded beside its actions (see ``Rollouts.behaviour``)
    behaviour: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class SequenceSample:
    """``B`` sequences of up to ``n`` steps, time-major. One ends early, after ``length`` of them, where its
    episode or the data do; what follows is zero, except for ``observation``, where it is arbitrary."""

    observation: Tensor  # [n, B, ...], or [1, B, ...]: see ``Sequences.every``
    action: Tensor  # [n, B] int64, or [n, B, D] float32
    reward: Tensor  # [n, B] float32
    length: Tensor  # [B] int64, at least 1
    terminated: Tensor  # [B] bool: the last step ended the task
    last_observation: Tensor  # [B, ...]: after the last step; of a truncated episode, its final observation
    behaviour: Mapping[str, Tensor] = field(default_factory=dict)  # [n, B, ...] by name


class World(Protocol):
    """Simulators, or a fixed set of examples. A frozen, picklable config.

    Worlds inherit from this class. Simulators also have ``open`` (``worlds.interface``), data sets
    ``divided`` (``datasets.interface``).
    """

    # what ``env_steps`` counts: "env steps" of simulators, or examples, named in the plural ("documents")
    unit: ClassVar[str] = "env steps"

    @property
    def name(self) -> str: ...

    def spec(self, fingerprint: Mapping[str, Any] | None = None) -> EnvSpec:
        """The spec from which a learner is built. fingerprint: as a run folder stores it; with it, a data set
        is not read."""
        ...

    def shared_by(self, simulators: int) -> World:
        """This world as each of a run's ``simulators`` opens it: what is counted over the run is divided
        among them."""
        return self

    def fingerprint(self) -> dict[str, Any] | None:
        """Plain values that identify this data set in a run folder; None for simulators."""
        return None

    def check_fingerprint(self, fingerprint: Mapping[str, Any], thorough: bool = True) -> None:
        """Raise Refusal if this data set has another fingerprint. thorough: read all of it, if that is
        necessary."""
        return None

    def bound_to_process(self) -> str | None:
        """Why no other process can open this world, and what to do; None: every process can."""
        return None

    def skipped(self) -> tuple[str, dict[str, int]] | None:
        """What could not be read and was left out: (message, counts by cause); None if nothing was."""
        return None


Shapes = Mapping[str, tuple[int, ...]]


class Requirement(Protocol):
    """The kind of batches that a learner needs; a property of its config.

    kind: matches ``SourceConfig.gives``. unit: matches ``World.unit``.
    """

    kind: ClassVar[str]

    @property
    def unit(self) -> str: ...


@dataclass(frozen=True)
class Rollouts:
    """A ``Trajectory`` of ``steps`` env steps of every simulator, each used once; by the present policy,
    unless the source has actors.

    behaviour: shapes, for one simulator, of the tensors (float32) that ``act`` returns beside the action, by
    name ("log_probability": (), say); they arrive as ``Trajectory.behaviour``.
    simulators: at least this many of each learner.
    """

    steps: int
    behaviour: Shapes = field(default_factory=dict)
    simulators: int = 1

    kind: ClassVar[str] = "rollouts"
    unit: ClassVar[str] = "env steps"


@dataclass(frozen=True)
class Transitions:
    """Batches of ``batch`` transitions drawn from a replay, with returns over ``n_step`` steps.

    behaviour: as in ``Rollouts``; of the first step of each transition, as ``Sample.behaviour``.
    """

    batch: int
    n_step: int
    discount: float
    behaviour: Shapes = field(default_factory=dict)

    kind: ClassVar[str] = "transitions"
    unit: ClassVar[str] = "env steps"


@dataclass(frozen=True)
class Model:
    """Batches of ``batch`` transitions of one step (``Sample``), most of them imagined: the learner fits a
    model to the world's transitions, and predicts others with it (``agents.interface.ModelAgent``).

    priorities: whether it gives priorities to the states from which it predicts (``PrioritizingAgent``).
    """

    batch: int
    discount: float
    priorities: bool = False

    kind: ClassVar[str] = "model"
    unit: ClassVar[str] = "env steps"
    n_step: ClassVar[int] = 1
    behaviour: ClassVar[Shapes] = {}


@dataclass(frozen=True)
class Sequences:
    """Batches of ``batch`` sequences of up to ``steps`` env steps, drawn from recent trajectories
    (``SequenceSample``).

    every: whether the observations before all steps are needed, or only those before the first.
    behaviour: as in ``Rollouts``; of all steps.
    """

    batch: int
    steps: int
    every: bool = False
    behaviour: Shapes = field(default_factory=dict)

    kind: ClassVar[str] = "sequences"
    unit: ClassVar[str] = "env steps"


@dataclass(frozen=True)
class Examples:
    """Mini-batches of ``batch`` of a fixed set of examples.

    unit: name of the examples, in the plural. shrinks: the largest share of its value by which an update may
    reduce a parameter, where parameters must stay above 0.
    """

    batch: int
    unit: str = "documents"
    shrinks: float = 0.0

    kind: ClassVar[str] = "examples"


@dataclass
class Batch:
    """What a source yields: the data, and the env steps and episodes since the last batch."""

    data: Any
    env_steps: int = 0
    episodes: Sequence[Episode] = ()

    def feedback(self, priorities: Tensor | None) -> None:
        """Return the learner's priorities [B] to the replay; other sources ignore them."""


@dataclass
class Outcome:
    """The result of one ``learn``.

    metrics: by name; tensors are read, and functions called, only for the updates that are recorded.
    priorities: [B], new priorities for the replay that the batch came from.
    """

    metrics: Mapping[str, Metric] = field(default_factory=dict)
    priorities: Tensor | None = None

    def read_metrics(self) -> dict[str, Tensor | float]:
        """The metrics, with functions called."""
        return {name: value() if callable(value) else value for name, value in self.metrics.items()}


@dataclass(frozen=True)
class Placement:
    """The device of each replica. Several replicas may share one.

    devices: devices of the replicas, in turn: ``cuda:0`` puts all learners on one GPU, ``cuda:0,cuda:1``
    alternates.
    threads: number of threads of torch in each process, and of those that draw large batches from a replay.
    """

    devices: tuple[str, ...] = ("cpu",)
    threads: Annotated[int, Range(1, 4096)] = 1

    def device(self, rank: int) -> torch.device:
        return torch.device(self.devices[rank % len(self.devices)])


def native_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` has native bfloat16 arithmetic; emulated, it is many times slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        with open("/proc/cpuinfo") as file:
            flags = file.read()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def derive_seed(run_seed: int, role: str, index: int = 0) -> int:
    """A 63-bit seed for one purpose of one role, from (run seed, role, index); never global state."""
    words = np.random.SeedSequence([run_seed, zlib.crc32(role.encode()), index]).generate_state(2)
    return (int(words[0]) << 31) ^ int(words[1])


def derive_generator(
    run_seed: int, role: str, index: int = 0, device: torch.device | str = "cpu"
) -> torch.Generator:
    return torch.Generator(device).manual_seed(derive_seed(run_seed, role, index))
