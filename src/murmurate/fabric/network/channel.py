"""One channel of the network fabric: register, mail and collectives over one member's connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmurate.fabric.interface import (
    BETWEEN_HOSTS,
    Capability,
    FabricError,
    Message,
    Traffic,
    check_shape,
    checked_rank,
)
from murmurate.fabric.network.collectives import NetworkCollectives
from murmurate.fabric.network.compression import Compression, codec
from murmurate.fabric.network.endpoint import Endpoint, digest
from murmurate.fabric.network.frames import Frame, FrameRejected, Kind
from murmurate.fabric.network.mailbox import NetworkMailbox
from murmurate.fabric.network.register import NetworkRegister
from murmurate.fabric.network.shm_channel import ShmChannel


class NetworkChannel:
    """One channel (see ``Channel``), without the capability of shared memory (``shared``), for vectors shaped
    like ``like`` [N]. Local peers still get vectors and mail through memory that they map (``ShmChannel``).

    Methods that strategies call take positions in ``group``; all other code of the network fabric uses ranks
    of the fabric.
    """

    capabilities: ClassVar[frozenset[Capability]] = BETWEEN_HOSTS

    def __init__(
        self, endpoint: Endpoint, name: str, like: Tensor, compression: Compression, group: tuple[int, ...]
    ) -> None:
        self._group, self._position = group, {rank: position for position, rank in enumerate(group)}
        self.rank, self.size, self.name = self._position[endpoint.rank], len(group), name
        self.traffic = Traffic()
        self._endpoint, self._shape, self._device = endpoint, like.shape, like.device
        self._count = like.numel()
        self._identity = digest(name) if self.size == endpoint.size else digest(name, *group)
        self._codec = codec(compression, self._count, like.dtype)
        # a short message is not compressed, and may be longer than a compressed one
        message_bytes = max(self._codec.wire_bytes, like.nbytes)
        self._shm = ShmChannel(
            endpoint.credentials.shm, self.size, self._codec.wire_bytes, message_bytes, endpoint.pool
        )
        peers = [rank for rank in group if rank != endpoint.rank]
        self._register = NetworkRegister(
            endpoint, name, self._identity, self._codec, self.traffic, self._shm, peers
        )
        self._mailbox = NetworkMailbox(
            endpoint, self._identity, self._codec, self.traffic, self._shaped, self._shm, like
        )
        self._collectives = NetworkCollectives(
            endpoint,
            name,
            self._identity,
            group,
            self._count,
            like.dtype,
            self.traffic,
            lambda: self._register.published,
        )
        # the vectors' form must be the same at all members; ``_mismatch`` says how it differs at a peer
        self._form = f"{self._count} numbers of {like.dtype}, compression {compression}"
        self._mismatch = ""
        with endpoint.lock:
            endpoint.add_channel(self._identity, self)
            for connection in (endpoint.connections[peer] for peer in peers):
                connection.announce(("form", self._identity.hex()), self._form)
                if connection.local_peer is not None:
                    self.local_peer_found(connection.peer)

    def living(self) -> Sequence[int]:
        return [self._position[rank] for rank in self._endpoint.living() if rank in self._position]

    def has_lost(self, rank: int) -> bool:
        return self._endpoint.has_lost(self._fabric_rank(rank))

    # -- register -----------------------------------------------------------------------------------

    def publish(self, x: Tensor) -> int:
        self._check(x)
        return self._register.publish(x)

    def version(self, peer: int) -> int:
        return self._register.version(self._fabric_rank(peer))

    def peek(self, peer: int) -> tuple[Tensor, int]:
        self._check()
        x, version = self._register.peek(self._fabric_rank(peer))
        return self._shaped(x), version

    def wait_newer(self, peers: Sequence[int], seen: Sequence[int], deadline_seconds: float) -> bool:
        with self._endpoint.lock, self.traffic.timed():
            return self._register.wait_newer([self._fabric_rank(p) for p in peers], seen, deadline_seconds)

    # -- collective ---------------------------------------------------------------------------------

    def mean_(self, x: Tensor) -> int:
        self._check(x)
        if self.size == 1:
            return 1
        result = self._run_round("mean", x)
        (mean,) = self._vectors(result.data)
        if result.divisor == 1:
            x.detach().copy_(mean)
        elif x.device.type == "cpu":
            torch.div(mean, result.divisor, out=x.detach())
        else:
            x.detach().copy_(mean / result.divisor)
        return len(result.members)

    def broadcast_(self, x: Tensor, root: int) -> None:
        self._check(x)
        if self.size == 1:
            return
        root_rank = self._fabric_rank(root)
        result = self._run_round(f"broadcast {root_rank}", x if self.rank == root else None)
        if root_rank not in result.members:
            raise FabricError(f"rank {root_rank} died before it could broadcast on channel '{self.name}'")
        x.detach().copy_(self._vectors(result.data)[0])

    def gather(self, x: Tensor) -> dict[int, Tensor]:
        self._check(x)
        if self.size == 1:
            return {self.rank: x.detach().clone()}
        result = self._run_round("gather", x)
        vectors = self._vectors(result.data)
        return {
            self._position[rank]: v.to(x.device, copy=True)
            for rank, v in zip(result.members, vectors, strict=True)
        }

    def _run_round(self, call: str, x: Tensor | None) -> Any:
        with self.traffic.timed():
            result = self._collectives.run(call, x)
        with self._endpoint.lock:
            for rank, version in result.versions.items():
                self._register.promise(rank, version)
        return result

    def _vectors(self, data: Any) -> list[Tensor]:
        """The vectors in the buffer of a round's result, in the channel's shape."""
        flat = torch.from_numpy(data).view(self._collectives.dtype)
        return [v.view(self._shape) for v in flat.view(-1, self._count)]

    # -- mail ---------------------------------------------------------------------------------------

    def send(
        self, to: int, tag: str, x: Tensor, note: float = 0.0, deadline_seconds: float | None = None
    ) -> bool:
        self._check(x, may_be_shorter=True)
        if deadline_seconds is None:
            deadline_seconds = self._endpoint.deadline_seconds
        return self._mailbox.send(self._fabric_rank(to), tag, x, note, deadline_seconds)

    def receive(self, tag: str) -> Message | None:
        with self._endpoint.lock:
            message = self._mailbox.receive(tag)
        return message and message._replace(sender=self._position[message.sender])

    def wait(self, tag: str, deadline_seconds: float) -> Message | None:
        with self._endpoint.lock, self.traffic.timed():
            self._endpoint.wait(lambda: self._mailbox.has(tag), deadline_seconds, in_memory=True)
        return self.receive(tag)

    # -- shared memory ------------------------------------------------------------------------------

    def shared(self, key: str, like: Tensor) -> Tensor:
        raise FabricError(
            f"'{key}' cannot be shared: members of a network fabric may be on different hosts. Use a "
            "strategy that needs no shared memory (gala, say), or --launcher local."
        )

    # -- called by the endpoint (with the lock held) ----------------------------------------------------

    def allocate_payload(self, frame: Frame, length: int) -> Any:
        self._check_length(frame, length)
        return self._endpoint.pool.take(length)

    def _check_length(self, frame: Frame, length: int) -> None:
        if frame.kind is Kind.ROUND:
            self._collectives.check_length(frame, length)
        elif frame.kind is Kind.MAIL and not self._mailbox.fits(length, bool(frame.meta.get("short"))):
            raise FrameRejected(
                "length", f"a message of {length} bytes on '{self.name}', which has {self._form}"
            )
        elif frame.kind is Kind.REGISTER and length != self._codec.wire_bytes:
            raise FrameRejected(
                "length", f"a vector of {length} bytes on '{self.name}', which has {self._form}"
            )

    def deliver(self, sender: int, frame: Frame) -> None:
        if sender not in self._position:
            raise FrameRejected("channel", f"a frame for '{self.name}' from a rank that is not in its group")
        if frame.payload is not None:
            # not checked before if the frame arrived before this channel was made
            self._check_length(frame, frame.length)
        if frame.kind is Kind.REGISTER:
            self._register.deliver(sender, frame)
        elif frame.kind is Kind.MAIL:
            self._mailbox.deliver(sender, frame)
        else:
            self._collectives.deliver(sender, frame)

    def receive_announcement(self, sender: int, key: str, rest: tuple[str, ...], value: Any) -> None:
        if sender not in self._position:
            raise FrameRejected("channel", f"a frame for '{self.name}' from a rank that is not in its group")
        try:
            if key == "taken":
                self._mailbox.receive_announcement(sender, rest[0], value)
            elif key in ("want", "nothing"):
                self._register.receive_announcement(sender, key, value)
            elif key == "group":
                self._collectives.receive_announcement(rest, value)
            elif key == "shm":
                self._map(sender, value)
            elif key == "unmapped":
                self._withdraw_lane(sender)
            elif key == "form" and value != self._form:
                self._mismatch = (
                    f"channel '{self.name}' is for {self._form} at rank {self._endpoint.rank} and for "
                    f"{value} at rank {sender}: give all members the same model and settings."
                )
                self._collectives.fail_all_rounds(self._mismatch)
        except (TypeError, ValueError, IndexError):
            raise FrameRejected("meta", f"a control message about '{key}' that cannot be read") from None

    def next_register_frame(self, peer: int) -> Frame | None:
        return self._register.next_register_frame(peer) if peer in self._position else None

    def local_peer_found(self, peer: int) -> None:
        """Offer a local peer our shared memory."""
        if peer not in self._position:
            return
        offered = self._shm.offer(peer)
        if offered is not None:
            self._register.on_register_offered()
            self._endpoint.connections[peer].announce(("shm", self._identity.hex()), offered)

    def _map(self, sender: int, offered: Any) -> None:
        """Map the memory that a local peer offers. If that fails, tell the peer, which then sends everything
        over the connection."""
        connection = self._endpoint.connections[sender]
        register, lane = (int(start) for start in offered)
        if self._mismatch:
            return
        try:
            if connection.local_peer is None:
                raise OSError("the peer is not on this host")
            if self._shm.map(sender, connection.local_peer, (register, lane)):
                self._register.on_peer_mapped(sender)
        except OSError as problem:
            self._endpoint.refuse("memory", f"shared memory that cannot be mapped ({problem})", sender)
            connection.announce(("unmapped", self._identity.hex()), True)
        self._endpoint.notify()

    def _withdraw_lane(self, sender: int) -> None:
        """A local peer could not map the lane to it: use the connection instead."""
        lane = self._shm.lanes.pop(sender, None)
        if lane is not None:
            lane.withdrawn = True
            self._mailbox.on_mapping_failed(sender, lane)
            self._register.on_mapping_failed(sender)

    def peer_restarted(self, peer: int) -> None:
        if peer not in self._position:
            return
        self._register.peer_restarted(peer)
        self._mailbox.peer_restarted(peer)
        self._shm.forget(peer)
        self._collectives.peer_restarted(peer)
        self._endpoint.connections[peer].announce(("form", self._identity.hex()), self._form)

    # -- internals ----------------------------------------------------------------------------------

    def _shaped(self, x: Tensor) -> Tensor:
        """``x`` in the channel's shape, on the replica's device."""
        if x.shape != self._shape:
            x = x.view(self._shape)
        return x if self._device.type == "cpu" else x.to(self._device)

    def _fabric_rank(self, rank: int) -> int:
        """The rank in the fabric of the member that has ``rank`` in this channel."""
        return self._group[checked_rank(rank, self.size)]

    def _check(self, x: Tensor | None = None, may_be_shorter: bool = False) -> None:
        """Raise FabricError if the members' channels do not match, and ValueError if ``x`` does not fit this
        one."""
        if self._mismatch:
            raise FabricError(self._mismatch)
        if x is not None and (x.numel() > self._count or not may_be_shorter):
            check_shape(self.name, self._shape, x)
