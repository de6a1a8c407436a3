"""The data types that worlds, sources, learners and strategies exchange.

Letters in shapes: ``T`` steps of a rollout, ``B`` simulators (``docs/notation.md`` has the whole table).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from murmurate.ranges import Range

# most combinations of an action's parts for which a message suggests ``--world.joint-actions``
_MOST_JOINED = 65_536
Metric = Tensor | float | None | Callable[[], Tensor | float]


@dataclass(frozen=True)
class EnvSpec:
    """The static description of a world: what a learner is built from.

    ``actions`` is the number of discrete actions, or 0 where actions are vectors of shape ``action_shape``.
    The bounds ``action_low`` and ``action_high`` have one number for each component of an action, in
    row-major order; by default -1 and 1. ``frames_per_step``: frames that one env step advances. ``stacked``:
    an observation is the last few images of the episode, the newest last (at an episode's beginning the first
    image is repeated, or, in Atari games, earlier ones are zeros): [stack * channels, H, W], where each image
    has ``channels`` channels. ``examples``: the size of a data set; 0 for simulators. ``class_counts``: how
    many of them each class has; empty if the world does not count them, None in a spec made from a
    fingerprint, without the data. ``factors``: where an action is a vector of whole numbers
    (from 0) that are chosen independently, the number of values of each; else empty. ``history``: where
    observations are vectors, how many successive observations of the episode each contains, the newest last.
    ``parts``: where an observation is a flattened Dict or Tuple, (name, start, stop, shape) of each of its
    parts in the vector; shape [C, H, W] is that of an image, else empty.

    Raises ``ValueError`` for a wrong number of bounds, or if a stack is not a whole number of images.
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
    parts: tuple[tuple[str, int, int, tuple[int, ...]], ...] = ()
    class_counts: tuple[int, ...] | None = field(default=(), compare=False)

    def __post_init__(self) -> None:
        dimensions = math.prod(self.action_shape) if self.action_shape else 0
        for name, default in (("action_low", -1.0), ("action_high", 1.0)):
            bounds = getattr(self, name) or (default,) * dimensions
            if len(bounds) != dimensions:
                raise ValueError(f"{name} has {len(bounds)} bounds for {dimensions} dimensions of an action")
            object.__setattr__(self, name, bounds)
        if self.stacked and (total := self.observation_shape[0]) % self.channels:
            raise ValueError(f"{total} channels are not a whole number of images of {self.channels}")

    @property
    def images(self) -> bool:
        """Whether observations are images [C, H, W] in uint8."""
        return len(self.observation_shape) == 3 and self.observation_dtype == torch.uint8

    @property
    def holds_images(self) -> bool:
        """Whether observations are images, or have some among their parts."""
        return self.images or any(shape for *_, shape in self.parts)

    @property
    def categorical(self) -> bool:
        """Whether actions are discrete: one number, or several chosen independently (``factors``)."""
        return bool(self.actions or self.factors)

    def refuse_factors(self, agent: str) -> None:
        """Raise ValueError if an action has several parts that are chosen independently."""
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

    success: whether the episode reached the task's goal; None if the world does not say. figures: what else
    the world measured in it, by name.
    """

    simulator: int
    episode_return: float
    length: int
    success: bool | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    def numbered_from(self, first: int) -> Episode:
        """The same, where ``first`` simulators of other groups or processes come before its own."""
        return replace(self, simulator=first + self.simulator)


@dataclass
class TimeStep:
    """What ``B`` simulators return for one action each (or for a reset).

    A simulator resets within the step that ends an episode: its ``observation`` is then the first of the next
    episode. ``reward`` is what the agent learns from (clipped or scaled where the world is configured so);
    the returns in ``episodes`` are sums of the game's own rewards. ``restarts``: a sentence for each
    simulator that was replaced because it failed; its episode ends truncated and is not among ``episodes``.
    """

    observation: Tensor  # [B, ...]
    reward: Tensor  # [B] float32
    terminated: Tensor  # [B] bool
    truncated: Tensor  # [B] bool
    # [B, ...]: the last observation of an ended episode. A row is valid where ``truncated``, and if
    # observations are vectors also where ``terminated``; None if no row is valid.
    final_observation: Tensor | None = None
    episodes: Sequence[Episode] = ()
    restarts: Sequence[str] = ()


@dataclass
class Trajectory:
    """``T`` steps of ``B`` simulators, time-major, with what is needed to bootstrap at the end."""

    observation: Tensor  # [T, B, ...]
    action: Tensor  # [T, B] int64, or [T, B, *action_shape] float32
    reward: Tensor  # [T, B] float32
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool
    first: Tensor  # [T, B] bool: observation t begins an episode
    last_observation: Tensor  # [B, ...]: after step T
    truncated_observation: Tensor | None = None  # [K, ...]: one row per True in truncated, row-major
    memory: Tensor | None = None  # [B, M]: recurrent state before step 0
    # by name, [T, B, ...] each: what the agent recorded beside its actions (see ``Rollouts.behaviour``)
    behaviour: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class SequenceSample:
    """``B`` sequences of up to ``n`` steps, time-major.

    A sequence ends early, after ``length`` steps, where its episode or the recorded data end. Entries after
    its end are zero, except for those of ``observation``, which are arbitrary.
    """

    observation: Tensor  # [n, B, ...], or [1, B, ...]: see ``Sequences.every``
    action: Tensor  # [n, B] int64, or [n, B, *action_shape] float32
    reward: Tensor  # [n, B] float32
    length: Tensor  # [B] int64, at least 1
    terminated: Tensor  # [B] bool: the last step ended the task
    last_observation: Tensor  # [B, ...]: after the last step; if it truncated the episode, the final one
    behaviour: Mapping[str, Tensor] = field(default_factory=dict)  # by name, [n, B, ...] each


class World(Protocol):
    """Simulators, or a fixed set of examples: a frozen, picklable config.

    Worlds inherit from this class. Simulators also have a method ``open`` (``worlds.interface``), data sets a
    method ``divided`` (``datasets.interface``).
    """

    # what ``env_steps`` counts: "env steps" for simulators; for a data set its examples, in the plural
    # ("documents")
    unit: ClassVar[str] = "env steps"
    has_image_files: ClassVar[bool] = False  # whether it is an ``ImageFilesWorld``, which decodes files

    @property
    def name(self) -> str: ...

    def spec(self, fingerprint: Mapping[str, Any] | None = None) -> EnvSpec:
        """The spec from which a learner is built.

        fingerprint: the fingerprint stored in a run folder; with it, a data set is not read.
        """
        ...

    def shared_by(self, simulators: int) -> World:
        """This world as each of a run's ``simulators`` opens it: settings that count over the whole run are
        divided among the simulators."""
        return self

    def fingerprint(self) -> dict[str, Any] | None:
        """Plain values that identify this data set in a run folder; None for simulators."""
        return None

    def check_fingerprint(self, fingerprint: Mapping[str, Any], thorough: bool = True) -> None:
        """Raise Refusal if this data set has another fingerprint. thorough: read the whole data set where
        that is necessary."""
        return None

    def bound_to_process(self) -> str | None:
        """Why no other process can open this world, and what to do; None if every process can."""
        return None

    def is_tried(self) -> bool:
        """Whether one of its simulators is reset and stepped before a run: for environments that users
        write."""
        return False

    def skipped(self) -> tuple[str, dict[str, int]] | None:
        """The examples that were left out because they could not be read: (message, counts by cause); None if
        there are none."""
        return None


Shapes = Mapping[str, tuple[int, ...]]


class Requirement(Protocol):
    """The kind of batches that a learner needs; a property of its config.

    kind: equals ``SourceConfig.gives`` of the sources that can serve it. unit: equals ``World.unit`` of the
    worlds that it can learn from.
    """

    kind: ClassVar[str]

    @property
    def unit(self) -> str: ...


@dataclass(frozen=True)
class Rollouts:
    """Trajectories of ``steps`` env steps of every simulator (``Trajectory``), each given to the learner
    once. The present policy acts in them, unless the source has actors.

    behaviour: by name, the shapes, for one simulator, of the float32 tensors that ``act`` returns beside the
    action ("log_probability": (), say); they arrive as ``Trajectory.behaviour``.
    simulators: the least number of simulators that each learner needs.
    """

    steps: int
    behaviour: Shapes = field(default_factory=dict)
    simulators: int = 1

    kind: ClassVar[str] = "rollouts"
    unit: ClassVar[str] = "env steps"


@dataclass(frozen=True)
class Transitions:
    """Batches of ``batch`` transitions drawn from a replay, with returns over ``n_step`` steps.

    behaviour: as in ``Rollouts``; recorded at the first step of each transition, it arrives as
    ``Sample.behaviour``.
    """

    batch: int
    n_step: int
    discount: float
    behaviour: Shapes = field(default_factory=dict)

    kind: ClassVar[str] = "transitions"
    unit: ClassVar[str] = "env steps"


@dataclass(frozen=True)
class Model:
    """Batches of ``batch`` transitions of one step (``Sample``), most of them predicted by a model: the
    learner fits the model to transitions of the world, and predicts others (``agents.interface.ModelAgent``).

    priorities: whether the learner gives priorities to the states at which predictions start
        (``PrioritizingAgent``).
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

    every: whether the observation before every step is needed, or only that before the first step.
    behaviour: as in ``Rollouts``; recorded at every step.
    """

    batch: int
    steps: int
    every: bool = False
    behaviour: Shapes = field(default_factory=dict)

    kind: ClassVar[str] = "sequences"
    unit: ClassVar[str] = "env steps"


@dataclass(frozen=True)
class Examples:
    """Mini-batches of ``batch`` examples, drawn from a fixed set.

    unit: name of the examples, in the plural. shrinks: where parameters must stay above 0, the largest
    fraction of its value by which one update may reduce a parameter; else 0.
    """

    batch: int
    unit: str = "documents"
    shrinks: float = 0.0

    kind: ClassVar[str] = "examples"


@dataclass
class Batch:
    """What a source yields: the data, the env steps made since its last batch, and the episodes finished
    since."""

    data: Any
    env_steps: int = 0
    episodes: Sequence[Episode] = ()

    def feedback(self, priorities: Tensor | None) -> None:
        """Return the learner's priorities [B] to the replay; sources without a replay ignore them."""


@dataclass
class Outcome:
    """The result of one call of ``learn``.

    metrics: by name; tensors are read, and functions called, only at the updates whose metrics are recorded.
        None stands for what was not measured, which is not recorded.
    priorities: [B], new priorities of the batch's transitions, for the replay from which they were drawn.
    """

    metrics: Mapping[str, Metric] = field(default_factory=dict)
    priorities: Tensor | None = None

    def read_metrics(self) -> dict[str, Tensor | float]:
        """The metrics that were measured, with each function replaced by the value that it returns."""
        return {
            name: value() if callable(value) else value
            for name, value in self.metrics.items()
            if value is not None
        }


@dataclass(frozen=True)
class Placement:
    """The device of each replica. Several replicas may share a device.

    devices: devices of the replicas, in turn: ``cuda:0`` puts all learners on one GPU, ``cuda:0,cuda:1``
    alternates.
    threads: number of torch threads in each process, and of threads that draw large batches from a replay.
    """

    devices: tuple[str, ...] = ("cpu",)
    threads: Annotated[int, Range(1, 4096)] = 1

    def device(self, rank: int) -> torch.device:
        return torch.device(self.devices[rank % len(self.devices)])


def derive_seed(run_seed: int, role: str, index: int = 0) -> int:
    """A 63-bit seed that depends only on (run seed, role, index), so that each use of random numbers can have
    a generator of its own instead of the global one."""
    words = np.random.SeedSequence([run_seed, zlib.crc32(role.encode()), index]).generate_state(2)
    return (int(words[0]) << 31) ^ int(words[1])


def derive_generator(
    run_seed: int, role: str, index: int = 0, device: torch.device | str = "cpu"
) -> torch.Generator:
    return torch.Generator(device).manual_seed(derive_seed(run_seed, role, index))


def restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Go on from a saved state. The state of another kind of device has another size: it becomes the seed."""
    if state.shape == generator.get_state().shape:
        generator.set_state(state.cpu())
    else:
        generator.manual_seed(derive_seed(zlib.crc32(bytes(state.tolist())), "of another kind of device"))
