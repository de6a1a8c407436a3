"""The nouns of the package: what flows between worlds, sources, learners and strategies.

Letters in shapes: ``T`` steps of a rollout, ``B`` simulators, ``A`` actions, ``N`` parameters
(``docs/notation.md`` has the whole table).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

Metric = Tensor | float | Callable[[], Tensor | float]


@dataclass(frozen=True)
class EnvSpec:
    """What an agent must know of a world before it has seen it.

    ``actions`` is the number of discrete actions, or 0 where actions are vectors of shape ``action_shape``.
    Their bounds ``action_low`` and ``action_high`` have one number for each of its dimensions, in row-major
    order; by default -1 and 1. ``stacked``: an observation is the last few images [stack, H, W] of its
    episode, the newest last (and the first one again where there are fewer). ``documents``: how many there
    are where an observation is one of a fixed set, and nobody acts.

    Raises ``ValueError`` for bounds of another number.
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
    documents: int = 0

    def __post_init__(self) -> None:
        dimensions = math.prod(self.action_shape) if self.action_shape else 0
        for name, usual in (("action_low", -1.0), ("action_high", 1.0)):
            bounds = getattr(self, name) or (usual,) * dimensions
            if len(bounds) != dimensions:
                raise ValueError(f"{name} has {len(bounds)} bounds for {dimensions} dimensions of an action")
            object.__setattr__(self, name, bounds)

    @property
    def images(self) -> bool:
        """Whether observations are images [C, H, W] in uint8."""
        return len(self.observation_shape) == 3 and self.observation_dtype == torch.uint8


@dataclass(frozen=True)
class Episode:
    """One whole game that ended: unclipped return, length in env steps, and which simulator."""

    simulator: int
    episode_return: float
    length: int


@dataclass
class TimeStep:
    """The answer of ``B`` simulators to one action each (or to a reset).

    Simulators reset within the step that ends an episode: ``observation`` is then the first of the
    next one. ``reward`` is what the agent learns from (clipped where the world says so);
    ``episodes`` counts whole games by their unclipped return.
    """

    observation: Tensor  # [B, ...]
    reward: Tensor  # [B] float32
    terminated: Tensor  # [B] bool
    truncated: Tensor  # [B] bool
    final_observation: Tensor | None = None  # [B, ...]; rows valid where truncated; None if nowhere
    episodes: Sequence[Episode] = ()


@dataclass
class Trajectory:
    """``T`` steps of ``B`` simulators, time-major, with all that is needed to bootstrap its end."""

    observation: Tensor  # [T, B, ...]
    action: Tensor  # [T, B] int64, or [T, B, D] float32
    reward: Tensor  # [T, B] float32
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool
    first: Tensor  # [T, B] bool: observation t begins an episode
    last_observation: Tensor  # [B, ...]: after step T
    truncated_observation: Tensor | None = None  # [K, ...]: one row per True in truncated, row-major
    memory: Tensor | None = None  # [B, M]: recurrent state before step 0
    # [T, B, ...] by name: what the agent recorded beside its actions (see ``Requirement.behaviour``)
    behaviour: Mapping[str, Tensor] = field(default_factory=dict)


class World(Protocol):
    """What is learned in or from: simulators, or a fixed set of examples. A frozen, picklable config.

    Worlds inherit from it. Simulators also have ``open`` (``worlds.interface``), data sets ``divided``
    (``datasets.interface``).
    """

    # what ``env_steps`` counts: "env steps" of simulators, else what one example is called, "documents" say
    unit: ClassVar[str] = "env steps"

    @property
    def name(self) -> str: ...

    def spec(self, fingerprint: Mapping[str, Any] | None = None) -> EnvSpec:
        """What a learner must know before it has seen anything. fingerprint: of the run that it is asked for;
        a data set then need not be read."""
        ...

    def fingerprint(self) -> dict[str, Any] | None:
        """Plain values by which a run folder tells this data set from another; None for simulators."""
        return None

    def check_fingerprint(self, fingerprint: Mapping[str, Any], thorough: bool = True) -> None:
        """Raise Refusal if this is not the data set with that fingerprint. thorough: read all of it, if that
        is what it takes."""
        return None

    def skipped(self) -> tuple[str, dict[str, int]] | None:
        """What of the source could not be read and was left out: in words, and how much by cause."""
        return None


Shapes = Mapping[str, tuple[int, ...]]


class Requirement(Protocol):
    """What a learner must be fed with: one value of its config.

    kind: which sources can give it (``SourceConfig.gives``). unit: of the worlds it can come from.
    """

    kind: ClassVar[str]

    @property
    def unit(self) -> str: ...


@dataclass(frozen=True)
class Rollouts:
    """A ``Trajectory`` of ``steps`` env steps of every simulator, each learned from once, on-policy.

    behaviour: shapes of one simulator's tensors (float32) that ``act`` gives beside the action, by name
    ("log_probability": (), say); they arrive as ``Trajectory.behaviour``.
    """

    steps: int
    behaviour: Shapes = field(default_factory=dict)

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
class Examples:
    """Mini-batches of ``batch`` of a fixed set of examples. Nobody acts.

    unit: what one is called in the worlds that have them. shrinks: the share of its parameters that an update
    takes away at most, where these must stay above 0.
    """

    batch: int
    unit: str = "documents"
    shrinks: float = 0.0

    kind: ClassVar[str] = "examples"


@dataclass
class Batch:
    """What a source yields: the data, and how much world it cost to make it."""

    data: Any
    env_steps: int = 0
    episodes: Sequence[Episode] = ()

    def feedback(self, priorities: Tensor | None) -> None:
        """Take priorities back to a prioritized source; on-policy batches have nobody to tell."""


@dataclass
class Outcome:
    """What one ``learn`` did.

    metrics: by name; tensors are read out, and functions called, only for the updates that are recorded.
    priorities: [B], for the replay that the batch came from.
    """

    metrics: Mapping[str, Metric] = field(default_factory=dict)
    priorities: Tensor | None = None

    def told(self) -> dict[str, Tensor | float]:
        """The metrics, with functions called."""
        return {name: value() if callable(value) else value for name, value in self.metrics.items()}


@dataclass(frozen=True)
class Placement:
    """Where each replica lives. Several replicas may name the same device.

    ``devices`` is cycled over the replicas: ``("cuda:0",)`` puts all learners on one GPU,
    ``("cuda:0", "cuda:1")`` alternates. ``threads`` is torch's thread count in each process, and that of
    searches for large batches from a replay.
    """

    devices: tuple[str, ...] = ("cpu",)
    threads: int = 1

    def device(self, rank: int) -> torch.device:
        return torch.device(self.devices[rank % len(self.devices)])


def native_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` multiplies bfloat16 itself; emulated, it is many times slower than float32."""
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
