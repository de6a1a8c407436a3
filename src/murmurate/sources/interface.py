"""Sources of batches: a config, which is a part of a Run, and the source that it opens for a replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from murmurate.fabric.interface import Channel
from murmurate.spec import Batch, Placement, World


class RunView(Protocol):
    """What a source and its config may read of a Run."""

    @property
    def world(self) -> World: ...
    @property
    def learner(self) -> Any: ...
    @property
    def strategy(self) -> Any: ...
    @property
    def replicas(self) -> int: ...
    @property
    def env_steps(self) -> int | None: ...
    @property
    def stop_at_return(self) -> float | None: ...
    @property
    def seed(self) -> int: ...
    @property
    def placement(self) -> Placement: ...
    def device(self, rank: int) -> torch.device: ...


@dataclass(frozen=True)
class SourceContext:
    """What one replica gives to the source that it opens.

    progress: returns the completed share of the run, in [0, 1]. channel: called with a name and a tensor of
    the shape and dtype to carry, opens a channel among the learners; all learners must open the same channels
    in the same order. address: address at which other hosts reach this host; empty if all learners are on one
    host.
    """

    run: RunView
    rank: int
    learner: Any
    progress: Callable[[], float]
    channel: Callable[[str, Tensor], Channel]
    address: str = ""

    @property
    def device(self) -> torch.device:
        return self.run.device(self.rank)


class Source(Protocol):
    """An endless iterator of batches. When ``alive`` returns True, the source stops preparing its batch, and
    may yield it without data.

    alive: set by the training loop. A source calls it from time to time while it prepares a batch, with the
    env steps made since the last batch; each call is a heartbeat, and True requests a stop.
    """

    alive: Callable[[int], bool]

    def __iter__(self) -> Iterator[Batch]: ...
    def __next__(self) -> Batch: ...

    @property
    def exact(self) -> bool:
        """Whether resuming from ``state`` is bit-exact."""
        ...

    def fields(self) -> dict[str, Any]:
        """Values for ``metrics.jsonl``, by name."""
        ...

    def events(self) -> Sequence[tuple[str, str]]:
        """Events since the last call: (kind, message)."""
        ...

    def state(self) -> dict[str, Any]:
        """Tensors and plain values, nested; call it between two batches only. The contents of replays are
        under ``replays``, by replay name; a checkpoint stores them in separate files."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. Raises ``ValueError`` for the state of another source."""
        ...

    def fresh_start(self, batches: int) -> None:
        """Begin in the middle of a run, in which each replica has learned from ``batches`` batches, with
        random seeds that neither a peer nor an earlier start of this replica has used."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class BatchShape:
    """How much work one batch of a learner is.

    simulators: number of simulators of a learner; for a learner of examples, which are read once for each
    batch, their number in a batch. groups: number of actor processes, or of halves of a double buffer, that
    they are divided into. steps: number of steps of all simulators for each batch. rows: the batch's size.
    env_steps: env steps for each batch. fit_steps, rollout_steps: gradient steps of the model, and steps of
    its rounds of rollouts, for each batch.
    """

    simulators: int
    groups: int
    steps: float
    rows: int
    fit_steps: float = 0.0
    rollout_steps: float = 0.0

    @property
    def env_steps(self) -> float:
        return self.steps * self.simulators


class SourceConfig(Protocol):
    """A frozen dataclass whose fields are options of the run, without a prefix.

    gives: the kind of batches, as in ``requires.kind`` of a learner.

    ``murmurate plan`` predicts runs with a source that has a ``batch_shape``. It tries other values of the
    fields ``simulators``, ``double_buffer``, ``actors`` and ``workers``, those of them that there are, which
    must mean what they do in the sources of this package; what ``acting_processes`` counts must be
    ``actors``, and what ``decoding_processes`` counts ``workers``, as costs are measured with 0 of both. A
    source of transitions, sequences or a model's transitions needs the other fields of this package's source
    of that kind, too.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    gives: ClassVar[str]

    def check(self, run: RunView) -> None:
        """Raise Refusal for values that make no sense in this run."""
        return None

    def batches(self, run: RunView) -> int | None:
        """Number of batches for each replica in the whole run; None if only time or updates end it."""
        ...

    def batches_at_once(self, run: RunView) -> int:
        """Number of batches that follow the same env steps, which are counted with the first of them."""
        return 1

    def acting_processes(self) -> int:
        """Number of processes of each replica that act while it learns; launchers whose workers share one
        process refuse them."""
        return 0

    def decoding_processes(self, run: RunView) -> int:
        """Number of processes of each replica that prepare its examples."""
        return 0

    def batch_shape(self, run: RunView) -> BatchShape | None:
        """How much work one batch of a learner is; None if it is not known, and no plan can be made."""
        return None

    def cost_settings(self) -> dict[str, Any]:
        """On what the costs of a batch's work depend besides its shape, by name: dataclasses, or values that
        JSON can hold. A plan measures sources of a class that differ in it separately."""
        return {}

    def memory_bytes(self, run: RunView) -> int:
        """Memory of one replica's source, including its processes. Raises Refusal for a config that can give
        no batch, or if a disk that the source needs is too small."""
        return 0

    def saved_bytes(self, run: RunView) -> int:
        """Bytes that one replica's source adds to a checkpoint, beyond a few kilobytes."""
        return 0

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise Refusal if ``state`` (``Source.state`` of a checkpoint) is of another config."""
        return None

    def open(self, context: SourceContext) -> Source: ...
