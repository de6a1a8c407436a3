"""One channel of the network fabric: a shelf, a postbox and rounds over the member's connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from murmurate.fabric.interface import Capability, FabricError, Message, Traffic, check_shape, checked_rank
from murmurate.fabric.network.collectives import NetworkCollectives
from murmurate.fabric.network.compression import Compression, codec
from murmurate.fabric.network.endpoint import Endpoint, short
from murmurate.fabric.network.fabric import OFFERED
from murmurate.fabric.network.frames import Frame, Kind, Refused
from murmurate.fabric.network.mailbox import NetworkMailbox
from murmurate.fabric.network.register import NetworkRegister
from murmurate.fabric.network.shm_channel import ShmChannel


class NetworkChannel:
    """One channel (see ``Channel``) for vectors shaped like ``like`` [N]; all but shared memory.

    What goes over connections, and all below this class, is by ranks of the fabric, not by
    positions in ``group``.
    """

    def __init__(
        self, endpoint: Endpoint, name: str, like: Tensor, compression: Compression, group: tuple[int, ...]
    ) -> None:
        self._group, self._place = group, {rank: place for place, rank in enumerate(group)}
        self.rank, self.size, self.name = self._place[endpoint.rank], len(group), name
        self.traffic = Traffic()
        self._endpoint, self._shape, self._device = endpoint, like.shape, like.device
        self._count = like.numel()
        self._identity = short(name) if self.size == endpoint.size else short(name, *group)
        self._codec = codec(compression, self._count, like.dtype)
        # a short message is not compressed, and may be longer than one that is
        message_bytes = max(self._codec.wire_bytes, like.numel() * like.element_size())
        self._shm = ShmChannel(
            endpoint.credentials.lender, self.size, self._codec.wire_bytes, message_bytes, endpoint.pool
        )
        peers = [rank for rank in group if rank != endpoint.rank]
        self._register = NetworkRegister(
            endpoint, name, self._identity, self._codec, self.traffic, self._shm, peers
        )
        self._mailbox = NetworkMailbox(
            endpoint, self._identity, self._codec, self.traffic, self._shaped, self._shm, like
        )
        self._rounds = NetworkCollectives(
            endpoint,
            name,
            self._identity,
            group,
            self._count,
            like.dtype,
            self.traffic,
            lambda: self._register.published,
        )
        self._form = f"{self._count} of {like.dtype}, compression {compression}"
        self._differs = ""
        with endpoint.lock:
            endpoint.join_channel(self._identity, self)
            for connection in (endpoint.connections[peer] for peer in peers):
                connection.announce(("form", self._identity.hex()), self._form)
                if connection.near is not None:
                    self.met(connection.peer)

    @property
    def capabilities(self) -> frozenset[Capability]:
        return OFFERED

    def living(self) -> Sequence[int]:
        return [self._place[rank] for rank in self._endpoint.living() if rank in self._place]

    def has_lost(self, rank: int) -> bool:
        return self._endpoint.has_lost(self._among(rank))

    # -- register -----------------------------------------------------------------------------------

    def publish(self, x: Tensor) -> int:
        self._check(x)
        return self._register.publish(x)

    def version(self, peer: int) -> int:
        return self._register.version(self._among(peer))

    def peek(self, peer: int) -> tuple[Tensor, int]:
        self._check()
        x, version = self._register.peek(self._among(peer))
        return self._shaped(x), version

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        with self._endpoint.lock, self.traffic.timed():
            return self._register.wait_newer([self._among(p) for p in peers], seen, deadline_seconds)

    # -- collective ---------------------------------------------------------------------------------

    def mean_(self, x: Tensor) -> int:
        self._check(x)
        if self.size == 1:
            return 1
        result = self._meet("mean", x)
        (mean,) = self._vectors(result.parts)
        if result.divisor == 1:
            x.detach().copy_(mean)
        elif x.device.type == "cpu":
            torch.div(mean, result.divisor, out=x.detach())
        else:
            x.detach().copy_(mean / result.divisor)
        return len(result.who)

    def broadcast_(self, x: Tensor, root: int) -> None:
        self._check(x)
        if self.size == 1:
            return
        result = self._meet(f"broadcast {self._among(root)}", x if self.rank == root else None)
        if self._among(root) not in result.who:
            raise FabricError(f"rank {root} died before it could broadcast on channel '{self.name}'")
        x.detach().copy_(self._vectors(result.parts)[0])

    def gather(self, x: Tensor) -> dict[int, Tensor]:
        self._check(x)
        if self.size == 1:
            return {self.rank: x.detach().clone()}
        result = self._meet("gather", x)
        vectors = self._vectors(result.parts)
        return {
            self._place[rank]: v.to(x.device, copy=True) for rank, v in zip(result.who, vectors, strict=True)
        }

    def _meet(self, call: str, x: Tensor | None) -> Any:
        with self.traffic.timed():
            result = self._rounds.meet(call, x)
        with self._endpoint.lock:
            for rank, version in result.versions.items():
                self._register.promise(rank, version)
        return result

    def _vectors(self, parts: Any) -> list[Tensor]:
        whole = torch.from_numpy(parts).view(self._rounds.dtype)
        return [v.view(self._shape) for v in whole.view(-1, self._count)]

    # -- mail ---------------------------------------------------------------------------------------

    def send(
        self, to: int, tag: str, x: Tensor, note: float = 0.0, deadline_seconds: float | None = None
    ) -> bool:
        self._check(x, shorter=True)
        patience = self._endpoint.deadline_seconds if deadline_seconds is None else deadline_seconds
        return self._mailbox.send(self._among(to), tag, x, note, patience)

    def receive(self, tag: str) -> Message | None:
        with self._endpoint.lock:
            message = self._mailbox.receive(tag)
        return message and message._replace(sender=self._place[message.sender])

    def wait(self, tag: str, deadline_seconds: float) -> Message | None:
        with self._endpoint.lock, self.traffic.timed():
            self._endpoint.wait(lambda: self._mailbox.has(tag), deadline_seconds, in_memory=True)
        return self.receive(tag)

    # -- shared memory ------------------------------------------------------------------------------

    def shared(self, key: str, like: Tensor) -> Tensor:
        raise FabricError(
            f"'{key}' cannot be shared: members of a network fabric may sit on different hosts. Use a "
            "strategy that needs no shared memory (gala, say), or --launcher local."
        )

    # -- what the connections bring (with the lock held) --------------------------------------------------

    def room(self, frame: Frame, length: int) -> Any:
        self._fits(frame, length)
        return self._endpoint.pool.take(length)

    def _fits(self, frame: Frame, length: int) -> None:
        if frame.kind is Kind.ROUND:
            self._rounds.fits(frame, length)
        elif frame.kind is Kind.MAIL and not self._mailbox.fits(length, bool(frame.meta.get("short"))):
            raise Refused("length", f"a message of {length} bytes on '{self.name}', which has {self._form}")
        elif frame.kind is Kind.REGISTER and length != self._codec.wire_bytes:
            raise Refused("length", f"a vector of {length} bytes on '{self.name}', which has {self._form}")

    def deliver(self, sender: int, frame: Frame) -> None:
        if sender not in self._place:
            raise Refused("channel", f"something for '{self.name}' from who is not in its group")
        if frame.payload is not None:
            self._fits(frame, frame.length)  # what came early has not been asked yet
        if frame.kind is Kind.REGISTER:
            self._register.deliver(sender, frame)
        elif frame.kind is Kind.MAIL:
            self._mailbox.deliver(sender, frame)
        else:
            self._rounds.deliver(sender, frame)

    def announced(self, sender: int, what: str, rest: tuple[str, ...], value: Any) -> None:
        if sender not in self._place:
            raise Refused("channel", f"something for '{self.name}' from who is not in its group")
        try:
            if what == "taken":
                self._mailbox.announced(sender, rest[0], value)
            elif what in ("want", "nothing"):
                self._register.announced(sender, what, value)
            elif what == "group":
                self._rounds.hear(rest, value)
            elif what == "desk":
                self._look(sender, value)
            elif what == "unseen":
                self._unseen(sender)
            elif what == "form" and value != self._form:
                self._differs = (
                    f"channel '{self.name}' is for {self._form} at rank {self.rank} and for {value} at rank "
                    f"{sender}: give all members the same model and settings."
                )
                self._rounds.fail(self._differs)
        except (TypeError, ValueError, IndexError):
            raise Refused("meta", f"a control message about '{what}' that cannot be read") from None

    def due(self, peer: int) -> Frame | None:
        return self._register.due(peer) if peer in self._place else None

    def met(self, peer: int) -> None:
        """Show a neighbour where to look."""
        if peer not in self._place:
            return
        shown = self._shm.show(peer)
        if shown is not None:
            self._register.showed()
            self._endpoint.connections[peer].announce(("desk", self._identity.hex()), shown)

    def _look(self, sender: int, shown: Any) -> None:
        """A neighbour shows something. If we cannot see it, that is sent over the line."""
        connection = self._endpoint.connections[sender]
        register, lane = (int(start) for start in shown)
        if self._differs:
            return
        try:
            if connection.near is None:
                raise OSError("it is no neighbour")
            if self._shm.look(sender, connection.near, (register, lane)):
                self._register.sees(sender)
        except OSError as problem:
            self._endpoint.refuse("memory", f"memory that cannot be read where it lies ({problem})", sender)
            connection.announce(("unseen", self._identity.hex()), True)
        self._endpoint.notify()

    def _unseen(self, sender: int) -> None:
        lane = self._shm.lanes.pop(sender, None)
        if lane is not None:
            lane.withdrawn = True
            self._mailbox.unseen(sender, lane)
            self._register.unseen(sender)

    def returned(self, peer: int) -> None:
        if peer not in self._place:
            return
        self._register.returned(peer)
        self._mailbox.returned(peer)
        self._shm.forget(peer)
        self._rounds.returned(peer)
        self._endpoint.connections[peer].announce(("form", self._identity.hex()), self._form)

    # -- underneath ---------------------------------------------------------------------------------

    def _shaped(self, x: Tensor) -> Tensor:
        if x.shape != self._shape:
            x = x.view(self._shape)
        return x if self._device.type == "cpu" else x.to(self._device)

    def _among(self, rank: int) -> int:
        """The rank in the fabric of one of the channel."""
        return self._group[checked_rank(rank, self.size)]

    def _check(self, x: Tensor | None = None, shorter: bool = False) -> None:
        if self._differs:
            raise FabricError(self._differs)
        if x is not None and (x.numel() > self._count or not shorter):
            check_shape(self.name, self._shape, x)
