"""The rendezvous of ranks that an engine started: rank 0 leads, and announces the job to the others.

All of it goes through the c10d store that the engine's environment names. A group may be started again
under the same store, so each start is an *epoch* of its own: rank 0 draws its number, the others register
with a nonce of their own, and only an announcement that repeats that nonce is meant for them.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from murmurate.errors import Refusal
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.fabric.processes.spawn import Exit
from murmurate.launch.host_memory import Offer, Process, borrow, lend, this_host
from murmurate.launch.job_spec import JobSpec

_GATHER_SECONDS = 300.0  # imports and the opening of simulators, on a busy machine
_STORE_SECONDS = 60.0
_POLL_SECONDS = 0.02
_COMMAND = "torchrun --nproc-per-node 2 -m murmurate train cartpole-gala --launcher torchrun"


@dataclass(frozen=True)
class Environment:
    """The variables that torch elastic (or a compatible engine) sets for this process."""

    rank: int
    size: int
    hosts: int
    address: str
    port: int
    restarts_allowed: int
    run_id: str
    agent_store: bool

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Environment:
        """Raises Refusal, naming the command, in a process without a rank."""
        try:
            size = int(environment["WORLD_SIZE"])
            return cls(
                int(environment["RANK"]),
                size,
                max(1, size // int(environment.get("LOCAL_WORLD_SIZE", size))),
                environment["MASTER_ADDR"],
                int(environment["MASTER_PORT"]),
                int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")),
                environment.get("TORCHELASTIC_RUN_ID", "none"),
                environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        except KeyError as missing:
            raise Refusal(
                f"the torchrun launcher takes its ranks from torchrun, and {missing.args[0]} is not set. "
                f"Run: {_COMMAND}; or use --launcher local."
            ) from None
        except ValueError as error:
            raise Refusal(
                f"the ranks in the environment make no sense ({error}). Start with torchrun: {_COMMAND}"
            ) from None


@dataclass(frozen=True)
class RankInfo:
    """What a rank registers with: its process, its host's name and address, whether it shares memory."""

    nonce: str
    process: Process
    name: str
    address: str
    shares: bool


class Rendezvous:
    """This process among the ranks of its group."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.process = Process.this()
        self._root = PrefixStore(f"murmurate/{environment.run_id}", _connect(environment))
        self.epoch = self._root.add("epoch", 1) if self.leads else 0
        self.offer: Offer | None = None
        self.others: dict[int, RankInfo] = {}
        self._memory_file: SharedMemoryFile | None = None

    @property
    def leads(self) -> bool:
        return self.environment.rank == 0

    @property
    def store(self) -> Store:
        """The part of the store that belongs to this epoch."""
        return PrefixStore(f"epoch-{self.epoch}", self._root)

    # -- what outlives an epoch

    def earlier_folder(self) -> Path | None:
        """The run folder that rank 0 claimed in an earlier epoch of this group."""
        return Path(self._root.get("folder").decode()) if self._root.check(["folder"]) else None

    def claimed(self, folder: Path) -> None:
        self._root.set("folder", str(folder.resolve()))

    # -- the leader

    def gather(self) -> bool:
        """Offer this host's memory and wait for the others; returns whether all of them share it.

        Raises Refusal naming the ranks that are missing.
        """
        self._memory_file = SharedMemoryFile.create()
        self.offer = lend(self._memory_file)
        self.store.set("offer", json.dumps(dataclasses.asdict(self.offer)))
        self._root.set("current", str(self.epoch))
        until = time.monotonic() + _GATHER_SECONDS
        silent = set(range(1, self.environment.size))
        while silent:
            for rank in sorted(silent):
                if self.store.check([f"rank/{rank}"]):
                    plain = json.loads(self.store.get(f"rank/{rank}"))
                    self.others[rank] = RankInfo(**{**plain, "process": Process(**plain["process"])})
                    silent.remove(rank)
            if silent and time.monotonic() > until:
                raise Refusal(
                    f"ranks {sorted(silent)} did not come within {_GATHER_SECONDS:g} s. "
                    "Look at their output, and give every host the same torchrun command."
                )
            time.sleep(_POLL_SECONDS if silent else 0)
        return self.offer.descriptor >= 0 and all(o.shares for o in self.others.values())

    def announce(self, spec: JobSpec) -> None:
        # each rank recognizes by its nonce that the job is for its present start
        nonces = {str(rank): peer.nonce for rank, peer in self.others.items()}
        announcement = {"nonces": nonces, "spec": dataclasses.asdict(spec)}
        self.store.set("announcement", json.dumps(announcement, default=str))  # a path as its name

    def dismiss(self, code: int, deadline_seconds: float = 5.0) -> None:
        """Tell the others to end with this exit code; returns once they have read it."""
        self.store.set("over", str(code))
        until = time.monotonic() + deadline_seconds
        while time.monotonic() < until and any(not o.process.is_gone() for o in self.others.values()):
            if self.store.add("heard", 0) >= len(self.others):
                return
            time.sleep(_POLL_SECONDS)

    def reported(self, rank: int) -> Exit | None:
        """How ``rank`` ended, if it reported that."""
        key = f"exit/{rank}"
        return Exit(**json.loads(self.store.get(key))) if self.store.check([key]) else None

    # -- the others

    def join(self) -> JobSpec:
        """Register with the leader, whichever epoch it is in, and wait for the job. Raises Refusal."""
        nonce = secrets.token_hex(8)
        until = time.monotonic() + _GATHER_SECONDS
        while True:
            if self._root.check(["current"]):
                current = int(self._root.get("current"))
                if current != self.epoch:
                    self.epoch = current
                    self._register(nonce)
                if self.store.check(["announcement"]):
                    announced = json.loads(self.store.get("announcement"))
                    if announced["nonces"].get(str(self.environment.rank)) == nonce:
                        return JobSpec.restored(announced["spec"])
                if self.store.check(["refused"]):
                    raise Refusal("rank 0 refused to start; see its output")
            if time.monotonic() > until:
                raise Refusal(
                    f"rank 0 did not call within {_GATHER_SECONDS:g} s. Look at its output, and give every "
                    "host the same torchrun command."
                )
            time.sleep(_POLL_SECONDS)

    def _register(self, nonce: str) -> None:
        self.offer = Offer(**json.loads(self.store.get("offer")))
        memory_file = borrow(self.offer)
        if memory_file is not None:
            memory_file.close()
        own_info = RankInfo(
            nonce, self.process, socket.gethostname(), self.address(), memory_file is not None
        )
        self.store.set(f"rank/{self.environment.rank}", json.dumps(dataclasses.asdict(own_info)))

    def report(self, end: Exit) -> None:
        """Report to the leader how this rank ended."""
        self.store.set(f"exit/{self.environment.rank}", json.dumps(dataclasses.asdict(end)))

    def dismissed(self, leader_is_gone: Callable[[], bool]) -> int | None:
        """The exit code that the leader publishes once every rank has saved; None if it ends before."""
        while True:
            is_gone = leader_is_gone()
            if self.store.check(["over"]):
                code = int(self.store.get("over"))
                self.store.add("heard", 1)
                return code
            if is_gone:
                return None
            time.sleep(_POLL_SECONDS)

    # -- both

    def refuse(self) -> None:
        """Announce that the leader does not start, so that the others do not wait."""
        self._root.set("current", str(self.epoch))
        self.store.set("refused", "1")

    def address(self) -> str:
        """The address at which the other hosts reach this one."""
        others = [o.address for o in self.others.values() if o.process.host != this_host()]
        return own_address(self.environment.address, others)

    def close(self) -> None:
        if self._memory_file is not None:
            self._memory_file.close()


def _connect(environment: Environment) -> TCPStore:
    try:
        return TCPStore(
            environment.address,
            environment.port,
            world_size=environment.size,
            is_master=environment.rank == 0 and not environment.agent_store,
            timeout=datetime.timedelta(seconds=_STORE_SECONDS),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        where, why = f"{environment.address}:{environment.port}", str(error).splitlines()[0]
        raise Refusal(
            f"the store at {where} does not answer ({why}). "
            "MASTER_ADDR and MASTER_PORT must lead to the first host from every host."
        ) from error


def own_address(leader: str, others: Sequence[str] = ()) -> str:
    """This host's address on the route to the leader's, unless MURMURATE_ADDRESS names another."""
    if address := os.environ.get("MURMURATE_ADDRESS"):
        return address
    address_here = _route(leader)
    if address_here.startswith("127.") and others:  # the leader's own name leads to itself
        return _route(others[0])
    return address_here


def _route(address: str) -> str:
    """This host's address on the route to ``address``; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
