"""Where a replica's batches come from: a config that is a part of a Run, and the source that it opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from murmurate.fabric.interface import Channel
from murmurate.spec import Batch, Placement, World


class RunView(Protocol):
    """What a source and its config may ask of a Run."""

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
    def launcher(self) -> str: ...
    @property
    def placement(self) -> Placement: ...
    def device(self, rank: int) -> torch.device: ...


@dataclass(frozen=True)
class SourceContext:
    """What a source is opened with, by one replica.

    progress: share of the run that lies behind, in [0, 1]. channel: opens a channel among the learners, by
    its name and a tensor like those that go through it; all learners open the same ones, in one order.
    """

    run: RunView
    rank: int
    learner: Any
    progress: Callable[[], float]
    channel: Callable[[str, Tensor], Channel]

    @property
    def device(self) -> torch.device:
        return self.run.device(self.rank)


class Source(Protocol):
    """Batches without end; or until ``alive`` asks for an end: then the last one may come without data.

    alive: to be called with the env steps played since the last batch, every now and then while a batch is
    long in coming: a sign of life; True requests a stop. The training loop sets it.
    """

    alive: Callable[[int], bool]

    def __iter__(self) -> Iterator[Batch]: ...
    def __next__(self) -> Batch: ...

    @property
    def exact(self) -> bool:
        """Whether ``state`` holds all that is needed to go on bit for bit."""
        ...

    def fields(self) -> dict[str, Any]:
        """What ``metrics.jsonl`` says of it, by name."""
        ...

    def events(self) -> Sequence[tuple[str, str]]:
        """What has happened since the last call: (kind, in words)."""
        ...

    def state(self) -> dict[str, Any]:
        """Between two batches only: tensors and plain values, nested. What replays hold is below
        ``replays``, by their names; a checkpoint keeps it in files of its own."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. Raises ``ValueError`` for the state of another source."""
        ...

    def fresh_start(self, batches: int) -> None:
        """Begin in the middle of a run, after the others have learned from ``batches`` batches each: with
        data of its own that neither a peer nor this replica's first start was given."""
        ...

    def close(self) -> None: ...


class SourceConfig(Protocol):
    """A frozen dataclass whose fields are options of the run, without a prefix.

    gives: the kind of requirement that it serves.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    gives: ClassVar[str]

    def check(self, run: RunView) -> None:
        """Raise Refusal for values that make no sense in this run."""
        return None

    def batches(self, run: RunView) -> int | None:
        """How many batches each replica learns from in the run; None if only time or updates end it."""
        ...

    def memory_bytes(self, run: RunView) -> int:
        """Of one replica's source, its processes included. Raises Refusal for what can give no batch, or
        where a disk that it needs is too small."""
        return 0

    def saved_bytes(self, run: RunView) -> int:
        """What one replica's source adds to a checkpoint, beyond the common kilobytes."""
        return 0

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise Refusal if ``Source.state`` of a checkpoint is of another config than this."""
        return None

    def open(self, context: SourceContext) -> Source: ...
