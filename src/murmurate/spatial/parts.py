"""The parts of one replica: messages between them, sums over them, and the vector that all of them hold."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from murmurate.buffers import as_bytes
from murmurate.errors import Refusal
from murmurate.fabric.awake import AwakeClock
from murmurate.fabric.interface import Channel, Fabric, FabricError, Message, ranks_within
from murmurate.replica.vector import Exchange, Replica
from murmurate.spec import derive_generator

_PIECE_BYTES = 1 << 20  # longer messages are sent in several pieces
_WAIT_SECONDS = 0.5  # longest wait at a time; then the part checks whether the awaited part has died
_RETRY_SECONDS = 1e-3  # between attempts to send while a queue to another part is full


class PartLost(FabricError):
    """Another part of this replica died, so the replica cannot go on."""


class Expected(NamedTuple):
    """A message that is expected from another part."""

    sender: int
    shape: tuple[int, ...]
    dtype: torch.dtype


# the parts of the replica whose script this thread runs; None outside ``murmurate.run``
of_script: ContextVar[Parts | None] = ContextVar("parts of the script", default=None)


class Parts:
    """One part's view of all parts of its replica.

    All parts make the same calls in the same order, also in backward passes.

    grid: parts along the rows and along the columns of an image; they are numbered row by row.
    channel: a channel of bytes (uint8) between exactly these parts; None for a single part.
    replica: the replica's number, for error messages and, with ``seed``, for the noise of dropout.
    deadline_seconds: how long a silent part is waited for.
    """

    def __init__(
        self,
        channel: Channel | None,
        grid: tuple[int, int],
        *,
        replica: int = 0,
        seed: int = 0,
        deadline_seconds: float = 60.0,
    ) -> None:
        self.grid, self.replica, self.deadline_seconds = grid, replica, deadline_seconds
        self.rank, self.size = (0, 1) if channel is None else (channel.rank, channel.size)
        if math.prod(grid) != self.size:
            raise Refusal(
                f"a grid of {grid[0]} x {grid[1]} has {math.prod(grid)} parts, and there are {self.size} "
                "members to hold them: give one member for each part"
            )
        self._channel, self._clock = channel, AwakeClock()
        self._open_channel: Callable[[str, Tensor], Channel] | None = None
        self._vectors: list[Channel] = []
        self._exchanges = 0
        self._arrived: defaultdict[int, deque[Message]] = defaultdict(deque)  # by sender
        self._unsent: deque[tuple[int, Tensor, int]] = deque()  # (part, piece, number of the exchange)
        self.own_noise = derive_generator(seed, f"spatial.part {self.rank}", replica)
        self.common_noise = derive_generator(seed, "spatial.all parts", replica)  # the same on all parts
        self.layer = ""  # the module whose forward pass was entered last, for error messages

    @classmethod
    def open(
        cls,
        fabric: Fabric,
        grid: int | tuple[int, int],
        *,
        seed: int = 0,
        deadline_seconds: float = 60.0,
        name: str = "parts",
        replica: int | None = None,
    ) -> Parts:
        """The parts of this member's replica; the parts of a replica are consecutive ranks of ``fabric``.

        grid: (parts along rows, parts along columns), or the number along rows alone. replica: number of the
        replica, where ``fabric`` has only its parts; None: by the rank. Every member must call this. Raises
        Refusal for numbers below 1, and for ranks that do not make whole replicas.
        """
        rows, columns = checked_grid(grid)
        parts = rows * columns
        if fabric.rank - fabric.rank % parts + parts > fabric.size:
            raise Refusal(
                f"{fabric.size} members do not make replicas of {rows} x {columns} parts: use a multiple of "
                f"{parts}"
            )
        channel, members = None, ranks_within(fabric.rank, parts)
        if parts > 1:
            channel = fabric.channel(name, torch.zeros(_PIECE_BYTES, dtype=torch.uint8), members)
        replica = fabric.rank // parts if replica is None else replica
        opened = cls(channel, (rows, columns), replica=replica, seed=seed, deadline_seconds=deadline_seconds)
        opened._open_channel = lambda label, like: fabric.channel(f"{name} {label}", like, members)
        return opened

    def __deepcopy__(self, memo: dict[int, Any]) -> Parts:
        """These parts: the copy of a module exchanges over the same channel."""
        return self

    @contextlib.contextmanager
    def in_script(self) -> Iterator[None]:
        """Meanwhile these are ``of_script`` in this thread."""
        token = of_script.set(self)
        try:
            yield
        finally:
            of_script.reset(token)

    def share(self, replica: Replica) -> PartsVector:
        """``replica``'s vector on all parts, with the leader's values (see ``PartsVector``).

        All parts call it for the same replicas in the same order.
        """
        channel = None
        if self.size > 1:
            assert self._open_channel is not None, "made by Parts.open"
            channel = self._open_channel(replica.name, replica.params.detach())
            self._vectors.append(channel)
        return PartsVector(self, channel, replica)

    @property
    def bytes(self) -> int:
        """Bytes exchanged so far."""
        return sum(c.traffic.bytes for c in self._channels)

    @property
    def waiting_seconds(self) -> float:
        return sum(c.traffic.waiting_seconds for c in self._channels)

    @property
    def _channels(self) -> list[Channel]:
        return [*([] if self._channel is None else [self._channel]), *self._vectors]

    # -- messages -----------------------------------------------------------------------------------

    def send(self, messages: Sequence[tuple[int, Tensor]]) -> int:
        """Begin an exchange: send each tensor to its part. Returns the exchange's number, for ``receive``.

        This does not wait: what does not yet fit into a queue is sent by ``receive``.
        """
        self._exchanges += 1
        for to, x in messages:
            # nothing is sent of a tensor without numbers, such as that of no images
            for piece in torch.split(as_bytes(x), _PIECE_BYTES) if x.numel() else ():
                self._unsent.append((to, piece, self._exchanges))
        self._flush()
        return self._exchanges

    def receive(self, number: int, expected: Sequence[Expected], patient: bool = False) -> list[Tensor]:
        """The messages of exchange ``number``, in the order of ``expected``, in host memory.

        patient: whether the senders may take any time. Raises PartLost if a part has died, and FabricError if
        one makes other calls or, unless ``patient``, is silent.
        """
        patience = math.inf if patient else self.deadline_seconds
        tensors = [self._assembled(number, message, patience) for message in expected]
        deadline = self._clock.now() + self.deadline_seconds
        while self._unsent:  # other parts may be waiting for these
            self._progress(None, deadline)
            self._flush()
        return tensors

    def gather(self, x: Tensor) -> list[Tensor]:
        """``x`` of every part, by rank; shapes and dtypes must be the same."""
        other_parts = [part for part in range(self.size) if part != self.rank]
        number = self.send([(part, x) for part in other_parts])
        arrived = self.receive(number, [Expected(part, tuple(x.shape), x.dtype) for part in other_parts])
        arrived = [y.to(x.device) for y in arrived]  # messages arrive in host memory
        return [*arrived[: self.rank], x.detach(), *arrived[self.rank :]]

    def sum(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all parts, in the order of ranks: the same bits on every part.

        Not differentiable, unlike ``reductions.summed``.
        """
        first, *rest = self.gather(x)
        total = first.clone()
        for addend in rest:
            total += addend
        return total

    def from_leader(self, x: Tensor) -> Tensor:
        """``x`` of part 0, the leader, on every part; shapes and dtypes must be the same.

        The leader may take any time, as it may wait for other replicas. Not differentiable.
        """
        if self.rank == 0:
            self.receive(self.send([(part, x) for part in range(1, self.size)]), [])
            return x
        expected = [Expected(0, tuple(x.shape), x.dtype)]
        (arrived,) = self.receive(self.send([]), expected, patient=True)
        return arrived.to(x.device, copy=True)  # messages are views of a queue's memory

    # -- internals ----------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Send unsent pieces until a queue is full."""
        while self._unsent:
            to, piece, number = self._unsent[0]
            assert self._channel is not None
            if not self._channel.send(to, f"from {self.rank}", piece, float(number), 0.0):
                self._check_alive(to)
                return
            self._unsent.popleft()

    def _assembled(self, number: int, expected: Expected, patience: float) -> Tensor:
        """The tensor of an expected message, which arrives in one or more pieces. patience: how long each may
        take, in seconds."""
        sender, shape, dtype = expected
        size = math.prod(shape) * dtype.itemsize
        pieces: list[Tensor] = []
        missing = size
        deadline = self._clock.now() + patience
        while missing > 0:
            if not self._arrived[sender]:
                self._progress(sender, deadline)
                self._flush()
                continue
            message = self._arrived[sender].popleft()
            missing -= message.x.nbytes
            if int(message.note) != number or missing < 0:
                raise FabricError(
                    f"part {sender} of replica {self.replica} is at exchange {int(message.note)}, while part "
                    f"{self.rank} is at {number} and awaits {size} bytes{self.where}: all parts must run the "
                    "same layers on the same images, in one order"
                )
            pieces.append(message.x)
            deadline = self._clock.now() + patience
        if not pieces:
            return torch.empty(shape, dtype=dtype)
        data = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return _reinterpreted(data, dtype, shape)

    def _progress(self, sender: int | None, deadline: float) -> None:
        """Wait a little for a message from ``sender``; None: until unsent ones may fit into a queue. If it is
        None or messages are unsent, also take all messages that have arrived from any part."""
        assert self._channel is not None
        if sender is None or self._unsent:
            for part in range(self.size):
                while (message := self._channel.receive(f"from {part}")) is not None:
                    self._arrived[part].append(message)
        if sender is not None and self._arrived[sender]:
            return
        # nothing ever arrives from this part itself: then the call below only waits
        awaited = self.rank if sender is None else sender
        message = self._channel.wait(f"from {awaited}", _RETRY_SECONDS if self._unsent else _WAIT_SECONDS)
        if message is not None:
            self._arrived[awaited].append(message)
            return
        silent = self._unsent[0][0] if sender is None else sender  # the former's queue is full
        self._check_alive(silent)
        if self._clock.now() > deadline:
            raise FabricError(
                f"part {self.rank} of replica {self.replica} waited {self.deadline_seconds:g} s for part "
                f"{silent}{self.where}. It is alive but does not answer: look at its log or output"
            )

    def _check_alive(self, part: int) -> None:
        if self._channel is not None and part != self.rank and self._channel.has_lost(part):
            raise PartLost(
                f"part {part} of replica {self.replica} died, so part {self.rank} cannot go on{self.where}"
            )

    def require(self, complete: bool) -> None:
        """Raise PartLost, naming the part that died, unless an exchange was ``complete``."""
        for part in () if complete else range(self.size):
            self._check_alive(part)
        if not complete:
            raise PartLost(
                f"a part of replica {self.replica} died, so part {self.rank} cannot go on{self.where}"
            )

    @property
    def where(self) -> str:
        """The present layer, in words, for an error message."""
        return f" (in or after layer '{self.layer}')" if self.layer else ""


class PartsVector:
    """A replica's vector, which all its parts hold with the values of the leader, part 0 (see
    ``replicator.replica_parts``). channel: a channel of this vector between the parts; None for a single
    part."""

    def __init__(self, parts: Parts, channel: Channel | None, replica: Replica) -> None:
        self._parts, self._channel = parts, channel
        with torch.no_grad():
            self.broadcast(replica.params.data)
            replica.reload()

    def exchange(self, replica: Replica, step: Callable[[Replica], Exchange]) -> Exchange:
        """Average the gradients over the parts; then the leader runs ``step``, and the others copy its
        parameters.

        This mean equals the sum of Jin's eq. 4.5, because each part computes the loss of the whole image.

        Raises PartLost if a part has died.
        """
        if self._channel is None:
            return step(replica)
        self._parts.require(self._channel.mean_(replica.grad) == self._parts.size)
        if replica.measure:
            replica.own_gradient = replica.grad.clone()  # the gradient of the whole replica, not of this part
        outcome = torch.zeros(len(Exchange._fields) + 1, dtype=torch.int64)
        if self._parts.rank == 0:
            outcome = torch.tensor([*step(replica), replica.clock], dtype=torch.int64)
        *fields, clock = (int(n) for n in self._parts.from_leader(outcome))
        while replica.clock < clock:
            replica.tick()
        self.broadcast(replica.params.data)
        return Exchange(*fields)

    def broadcast(self, vector: Tensor) -> None:
        """Replace ``vector`` [N] on every part by the leader's. Raises PartLost if the leader has died."""
        if self._channel is None:
            return
        try:
            self._channel.broadcast_(vector, 0)
        except PartLost:
            raise
        except FabricError:
            self._parts.require(not self._channel.has_lost(0))
            raise


def checked_grid(grid: int | Sequence[int]) -> tuple[int, int]:
    """(parts along rows, along columns). Raises Refusal unless it is one or two numbers of 1 or more."""
    numbers: tuple[Any, ...] = (grid, 1)
    if not isinstance(grid, int | Integral):
        numbers = tuple(grid) if isinstance(grid, Iterable) else ()
    if len(numbers) != 2 or any(not isinstance(n, int | Integral) or n < 1 for n in numbers):
        raise Refusal(f"parts is {grid!r}: give the parts along rows and columns, for example (2, 2), or 2")
    return int(numbers[0]), int(numbers[1])


def _reinterpreted(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """``data`` (bytes) as a tensor of this dtype and shape; copied only if its alignment requires it."""
    if data.storage_offset() * data.element_size() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(shape)
