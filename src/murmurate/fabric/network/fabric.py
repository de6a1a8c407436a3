"""The fabric across hosts: an authenticated and encrypted TCP connection between every two members.

*Register*: a reader has at most one request pending, so it gets the newest version whenever the connection is
free, and a publisher sends nothing to members that do not read (``register``).

*Mail*: messages are numbered, acknowledged, and sent again over a new connection. A message that ``send``
accepted arrives once, however often the connection breaks, as long as both processes live (``connection``,
``mailbox``).

*Local peers* (members on the same host) exchange versions and mail in shared memory, as on the processes
fabric (``shm_channel``).

*Collectives* are executed directly between the members, or by gloo where nothing has to be encrypted; when a
member is lost, through the lowest living one (``collectives``). Strategies cannot use shared memory.

Messages from outside this run and epoch, and messages that were changed on their way, are refused, counted by
cause in ``NetworkFabric.refused``, and logged to ``murmurate.fabric.network.fabric``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from murmurate.errors import MissingExtra
from murmurate.fabric.interface import BETWEEN_HOSTS, Capability, Fabric, checked_group, checked_rank
from murmurate.fabric.network.compression import Compression, codec
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.fabric.processes.spawn import Died, run

if TYPE_CHECKING:  # modules that need the package cryptography are imported when the fabric is made
    from torch._C._distributed_c10d import Store

    from murmurate.fabric.network.channel import NetworkChannel
    from murmurate.fabric.network.endpoint import Endpoint

__all__ = ["Compression", "Died", "NetworkFabric", "run_members"]


@dataclasses.dataclass(frozen=True)
class NetworkFabric:
    """One member's fabric (see ``Fabric``); constructing it waits for all other members.

    store: c10d store, used only to exchange the members' addresses and public keys.
    run_id, epoch: messages of another run or epoch are refused.
    secret: known to the members alone. Without it, anyone who can write to the store can become a member.
    address: the address on which this member listens and at which the others reach it; the default can be
        reached only from this host.
    encrypt: False sends vectors unencrypted, and means by gloo; all other traffic is still authenticated.
    run_state: the launcher's run state, if it can be read on this host: a member marked dead there counts as
        dead at once.
    deadline_seconds: the deadline of the rendezvous, of collectives, and of sends into a full queue.
    compression: how vectors of register and mail are compressed.
    cipher: "aes-256-gcm", or "chacha20-poly1305" for processors without instructions for AES.
    silence_seconds: a connection on which nothing arrived for so long is closed and made again.
    shared_memory: whether vectors for members on the same host, started by the same user, stay in memory that
        both map, unencrypted, with only their address sent. False sends everything.

    Raises MissingExtra without the package cryptography, FabricError if a member does not arrive, and
    ValueError for an unknown cipher or compression, or a rank that is not below size.
    """

    rank: int
    size: int
    store: Store = dataclasses.field(repr=False)
    _: dataclasses.KW_ONLY
    run_id: str
    epoch: int = 0
    secret: bytes | None = dataclasses.field(default=None, repr=False)
    address: str = "127.0.0.1"
    encrypt: bool = True
    run_state: RunState | None = dataclasses.field(default=None, repr=False)
    deadline_seconds: float = 60.0
    compression: Compression = "none"
    cipher: str = "aes-256-gcm"
    silence_seconds: float = 4.0
    shared_memory: bool = True
    endpoint: Endpoint = dataclasses.field(init=False, repr=False)
    capabilities: ClassVar[frozenset[Capability]] = BETWEEN_HOSTS

    def __post_init__(self) -> None:
        checked_rank(self.rank, self.size)
        if importlib.util.find_spec("cryptography") is None:
            raise MissingExtra("cryptography", "network", "The fabric between hosts")
        from murmurate.fabric.network.crypto import CIPHERS, Identity
        from murmurate.fabric.network.endpoint import Endpoint, digest
        from murmurate.fabric.network.handshake import Credentials
        from murmurate.fabric.network.shm_peer import ShmOwner

        if self.cipher not in CIPHERS:
            raise ValueError(f"cipher is one of {', '.join(CIPHERS)}, not '{self.cipher}'")
        codec(self.compression, 1, torch.float32)  # only to check the name of the compression
        identity = Identity()
        credentials = Credentials(
            self.rank,
            digest(self.run_id, size_bytes=16),
            self.epoch,
            self.secret or b"",
            identity,
            self.encrypt,
            self.cipher,
            self.silence_seconds,
            ShmOwner(identity.incarnation) if self.shared_memory else None,
        )
        endpoint = Endpoint(
            credentials, self.size, self.store, self.address, self.run_state, self.deadline_seconds
        )
        object.__setattr__(self, "endpoint", endpoint)

    @property
    def refused(self) -> Mapping[str, int]:
        """The number of refused messages and connections, by cause."""
        return dict(self.endpoint.refused)

    def living(self) -> Sequence[int]:
        return self.endpoint.living()

    def channel(self, name: str, like: Tensor, members: Sequence[int] | None = None) -> NetworkChannel:
        from murmurate.fabric.network.channel import NetworkChannel

        group = checked_group(members, self.rank, self.size)
        return NetworkChannel(self.endpoint, name, like, self.compression, group)

    def close(self, linger_seconds: float | None = None) -> None:
        """Take no further part, but answer the others until all have closed or ``linger_seconds`` have passed
        (by default the deadline); then end all threads and connections."""
        self.endpoint.close(self.deadline_seconds if linger_seconds is None else linger_seconds)


def run_members(
    size: int,
    functions: Sequence[Callable[[Fabric], Any]],
    deadline_seconds: float = 60.0,
    **options: Any,
) -> list[Any]:
    """As ``murmurate.fabric.processes.fabric.run_members``, with connections over loopback.

    options: further arguments of ``NetworkFabric``.
    """
    with tempfile.TemporaryDirectory(prefix="murmurate-") as folder:
        make_fabric = functools.partial(
            _make_fabric,
            os.path.join(folder, "rendezvous"),
            secrets.token_hex(8),
            secrets.token_bytes(32),
            options,
        )
        return run(size, functions, make_fabric, deadline_seconds)


def _make_fabric(
    file: str,
    run_id: str,
    secret: bytes,
    options: dict[str, Any],
    memory_file: SharedMemoryFile,
    run_state: RunState,
    rank: int,
    deadline_seconds: float,
) -> NetworkFabric:
    store = dist.FileStore(file, run_state.size)  # type: ignore[attr-defined]
    settings: dict[str, Any] = {"run_state": run_state, "deadline_seconds": deadline_seconds} | options
    return NetworkFabric(rank, run_state.size, store, run_id=run_id, secret=secret, **settings)
