"""The rendezvous of ranks that another engine started: rank 0 leads, and announces the job to the others.

Ranks communicate through the c10d store that the engine's environment variables name. A group may be started
again with the same store, so each start is an *epoch* of its own. Rank 0 draws the epoch's number; each other
rank registers with a nonce, and accepts only an announcement that repeats it. Whoever can connect to the
store's port can write to it, so ranks authenticate all that they read, with the run's secret.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import re
import secrets
import socket
import sys
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from murmurate.errors import Refusal
from murmurate.fabric.network.authenticated_store import AuthenticatedStore, Unauthentic
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.fabric.processes.spawn import Exit
from murmurate.launch.addresses import own_address
from murmurate.launch.host_memory import MemoryOffer, Process, can_borrow, lend, this_host
from murmurate.launch.job_spec import JobSpec
from murmurate.launch.secret import SET_IT, VARIABLE, user_secret

_GATHER_SECONDS = 300.0  # how long ranks may take to import and to open simulators, on a busy machine
_QUIET_SECONDS = 20.0  # after which a rank says for whom it waits
_STORE_SECONDS = 60.0
_POLL_SECONDS = 0.02
_PIECE_BYTES = 2**22  # a torch store takes no value of 8 MiB
_NO_RUN_ID = "none"  # the run id that torchrun sets without --rdzv-id
_COMMAND = "torchrun --nproc-per-node 2 -m murmurate ..., with a rank for each replica"


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
        """Read the variables. Raises Refusal, with the command to use, in a process without a rank."""
        try:
            size = int(environment["WORLD_SIZE"])
            return cls(
                int(environment["RANK"]),
                size,
                _hosts(environment, size),
                environment["MASTER_ADDR"],
                int(environment["MASTER_PORT"]),
                int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")),
                environment.get("TORCHELASTIC_RUN_ID", _NO_RUN_ID),
                environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        except KeyError as missing:
            raise Refusal(
                f"the torchrun launcher takes its ranks from torchrun, and {missing.args[0]} is not set. "
                f"Start the same command with torchrun: {_COMMAND}; or use --launcher local."
            ) from None
        except ValueError as error:
            raise Refusal(
                f"the ranks in the environment make no sense ({error}). Start with torchrun: {_COMMAND}"
            ) from None


def _hosts(environment: Mapping[str, str], size: int) -> int:
    """The number of hosts; if the engine does not tell it, an estimate, which is 1 only if this host has all
    ranks."""
    if (agents := int(environment.get("GROUP_WORLD_SIZE", 0))) > 0:
        return agents
    return math.ceil(size / max(1, int(environment.get("LOCAL_WORLD_SIZE", size))))


@dataclass(frozen=True)
class RankInfo:
    """What a rank registers: its process, its host's name and address, and whether it shares the leader's
    memory."""

    nonce: str
    process: Process
    name: str
    address: str
    can_borrow: bool


class Rendezvous:
    """This process among the ranks of its group. Raises Refusal if the store does not answer, or the secret
    can be guessed."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.process = Process.this()
        secret = user_secret()
        self._engine_store = _connect(environment)
        self.run_id = _run_id(environment, self._engine_store)
        self._place = _place(self.run_id)
        self._root = AuthenticatedStore(self._engine_store, self._place, secret)
        self._memory_file: SharedMemoryFile | None = None
        self._job, self._ended_epoch = 0, -1
        self._enter(0)
        self.begin()

    @property
    def leads(self) -> bool:
        return self.environment.rank == 0

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch
        self._messages = self._root.part(f"epoch-{epoch}")

    def begin(self) -> None:
        """Begin a job, before ``gather`` or ``join``. The constructor does so for the first job."""
        self._job += 1
        if self.leads:
            # random, so that nothing that was written in another epoch can be valid in this one
            self._enter(secrets.randbits(62))
        self.offer: MemoryOffer | None = None
        self.others: dict[int, RankInfo] = {}

    def end(self) -> None:
        """The job is over: the next one has another epoch."""
        self._ended_epoch = self.epoch

    def _begin_if_ended(self) -> None:
        if self.epoch == self._ended_epoch:
            self.begin()

    @property
    def store(self) -> Store:
        """The part of the store that belongs to this epoch."""
        return PrefixStore(f"{self._place}/epoch-{self.epoch}", self._engine_store)

    @classmethod
    def client(cls, environment: Environment, run_id: str, epoch: int) -> Store:
        """``store`` of ``epoch``, for a process that the leader started and that is no rank itself."""
        store = _connect(dataclasses.replace(environment, agent_store=True))
        return PrefixStore(f"{_place(run_id)}/epoch-{epoch}", store)

    # -- values that outlive an epoch

    def earlier_folder(self) -> Path | None:
        """The run folder that rank 0 claimed for this job before the group was started again, if there is
        one. Raises Refusal if it was written with another secret."""
        self._begin_if_ended()
        key = f"folder/{self._job}"
        return Path(self._trusted(self._root, key).decode()) if self._root.check(key) else None

    def claimed(self, folder: Path) -> None:
        """Rank 0 has claimed ``folder`` as the run folder: later epochs find it by ``earlier_folder``."""
        self._root.set(f"folder/{self._job}", str(folder.resolve()).encode())

    # -- the leader

    def gather(self) -> None:
        """Wait for the other ranks; set ``offer`` to that of this host's memory, if all of them can share it.

        Raises Refusal, naming the ranks that are missing or have another secret.
        """
        self._begin_if_ended()
        self._memory_file = SharedMemoryFile.create()
        offer = lend(self._memory_file)
        self._messages.set("offer", json.dumps(dataclasses.asdict(offer)).encode())
        self._root.set("current", str(self.epoch).encode(), alone=False)
        until = time.monotonic() + _GATHER_SECONDS
        say_at = time.monotonic() + _QUIET_SECONDS
        missing = set(range(1, self.environment.size))
        while missing:
            for rank in sorted(missing):
                if self._messages.check(f"rank/{rank}"):
                    plain = json.loads(self._trusted(self._messages, f"rank/{rank}", rank))
                    self.others[rank] = RankInfo(**{**plain, "process": Process(**plain["process"])})
                    missing.remove(rank)
            if missing and time.monotonic() > say_at:
                _say(f"waiting for rank(s) {sorted(missing)}, which have not begun yet")
                say_at = math.inf
            if missing and time.monotonic() > until:
                raise Refusal(
                    f"ranks {sorted(missing)} did not register within {_GATHER_SECONDS:g} s. "
                    "Look at their output, and give every host the same torchrun command."
                )
            time.sleep(_POLL_SECONDS if missing else 0)
        if offer.descriptor >= 0 and all(other.can_borrow for other in self.others.values()):
            self.offer = offer

    def announce(self, spec: JobSpec) -> None:
        """Announce the job to the other ranks."""
        # each rank recognizes by its nonce that the announcement answers its own registration
        nonces = {str(rank): peer.nonce for rank, peer in self.others.items()}
        announcement = {"nonces": nonces, "spec": dataclasses.asdict(spec)}
        # ``default=str``: paths are written as strings
        self._messages.set("announcement", json.dumps(announcement, default=str).encode())

    def dismiss(self, code: int, deadline_seconds: float = 5.0) -> None:
        """Tell the others to end with this exit code; returns once each has confirmed or ended, or at the
        deadline."""
        self._messages.set("over", str(code).encode())
        until = time.monotonic() + deadline_seconds
        while time.monotonic() < until and not all(
            other.process.is_gone() or self._messages.find(f"heard/{rank}") is not None
            for rank, other in self.others.items()
        ):
            time.sleep(_POLL_SECONDS)

    def reported(self, rank: int) -> Exit | None:
        """How ``rank`` ended, if it reported that."""
        report = self._messages.find(f"exit/{rank}")
        return None if report is None else Exit(**json.loads(report))

    # -- the others

    def join(self) -> JobSpec:
        """Register with the leader, in whatever epoch it is, and wait for the job. Raises Refusal."""
        nonce = secrets.token_hex(8)
        until = time.monotonic() + _GATHER_SECONDS
        say_at = time.monotonic() + _QUIET_SECONDS
        earlier_epoch, is_first_look = self._ended_epoch, True
        while True:
            if self._root.check("current"):
                epoch = int(self._leaders_epoch(nonce))
                is_new = epoch != self.epoch
                if is_new:
                    self._enter(epoch)
                if self._messages.find("refused") is not None:
                    if is_first_look and self.environment.restarts_allowed:
                        earlier_epoch = epoch  # after a restart, rank 0 may not be here yet
                    if epoch != earlier_epoch:
                        raise Refusal("rank 0 refused to start; see its output")
                elif is_new:
                    self._register(nonce)
                if self._messages.check("announcement"):
                    announced = json.loads(self._trusted(self._messages, "announcement"))
                    if announced["nonces"].get(str(self.environment.rank)) == nonce:
                        return JobSpec.restored(announced["spec"])
            if time.monotonic() > say_at and os.environ.get("LOCAL_RANK", "0") == "0":
                _say(f"rank {self.environment.rank} waits for rank 0, which has announced no job yet")
                say_at = math.inf
            if time.monotonic() > until:
                raise Refusal(
                    f"rank 0 did not announce a job within {_GATHER_SECONDS:g} s. Look at its output, and "
                    "give every host the same torchrun command."
                )
            is_first_look = False
            time.sleep(_POLL_SECONDS)

    def _leaders_epoch(self, nonce: str) -> bytes:
        """The epoch's number. If the leader has another secret, raises Refusal, but registers before, so that
        the leader learns of it and refuses this rank, too."""
        try:
            return self._root.get("current")
        except Unauthentic as problem:
            if problem.content.isdigit():
                self._enter(int(problem.content[:20]))
                self._introduce(nonce, can_borrow=False)
            raise self._refusal(problem) from problem

    def _register(self, nonce: str) -> None:
        """Try whether the leader's memory can be shared, and register."""
        offer = MemoryOffer(**json.loads(self._trusted(self._messages, "offer")))
        self._introduce(nonce, can_borrow(offer))

    def _introduce(self, nonce: str, can_borrow: bool) -> None:
        own_info = RankInfo(nonce, self.process, socket.gethostname(), self.address(), can_borrow)
        text = json.dumps(dataclasses.asdict(own_info))
        self._messages.set(f"rank/{self.environment.rank}", text.encode())

    def report(self, end: Exit) -> None:
        """Report to the leader how this rank ended."""
        self._messages.set(f"exit/{self.environment.rank}", json.dumps(dataclasses.asdict(end)).encode())

    def await_dismissal(self, leader_is_gone: Callable[[], bool]) -> int | None:
        """Wait for the exit code that the leader publishes at the end; None if the leader ends before."""
        while True:
            is_gone = leader_is_gone()  # asked first: the leader may publish the code and then end
            code = self.dismissal_code()
            if code is not None:
                self.confirm_dismissal()
                return code
            if is_gone:
                return None
            time.sleep(_POLL_SECONDS)

    def dismissal_code(self) -> int | None:
        """The exit code that the leader has published; None before."""
        code = self._messages.find("over")
        return None if code is None else int(code)

    def confirm_dismissal(self) -> None:
        """Tell the leader that it need not wait for this rank any more."""
        self._messages.set(f"heard/{self.environment.rank}", b"1")

    # -- both

    def share(self, key: str, content: bytes) -> None:
        """Write ``content``, of any length, for the other ranks. A key can be used once in each epoch."""
        pieces = range(0, len(content), _PIECE_BYTES)
        for number, start in enumerate(pieces):
            self._messages.set(f"{key}/{number}", content[start : start + _PIECE_BYTES])
        self._messages.set(key, str(len(pieces)).encode())

    def shared(self, key: str) -> bytes | None:
        """What a rank has written by ``share``; None if there is nothing, or if a stranger has written it."""
        count = self._messages.find(key)
        pieces = [self._messages.find(f"{key}/{number}") for number in range(int(count or 0))]
        present = [piece for piece in pieces if piece is not None]
        return None if count is None or len(present) < len(pieces) else b"".join(present)

    def refuse(self) -> None:
        """Announce that the leader does not start, so that the others do not wait."""
        self._begin_if_ended()
        self._messages.set("refused", b"1")
        self._root.set("current", str(self.epoch).encode(), alone=False)
        self.end()

    def _trusted(self, store: AuthenticatedStore, key: str, writer: int = 0) -> bytes:
        """The value that rank ``writer`` has written. Raises Refusal if that rank has another secret."""
        try:
            return store.get(key)
        except Unauthentic as problem:
            raise self._refusal(problem, writer) from problem

    def _refusal(self, problem: Unauthentic, writer: int = 0) -> Refusal:
        return Refusal(
            f"rank {writer}{_claimed_process(problem.content)} has another {VARIABLE} than rank "
            f"{self.environment.rank}, or none; or a stranger has written into the store ({problem}). "
            f"{SET_IT}"
        )

    def address(self) -> str:
        """The address at which the other hosts reach this one."""
        others = [other.address for other in self.others.values() if other.process.host != this_host()]
        return own_address(self.environment.address, others)

    def close(self) -> None:
        if self._memory_file is not None:
            self._memory_file.close()


def _say(what: str) -> None:
    print(f"murmurate: {what} (at most {_GATHER_SECONDS:g} s)", file=sys.stderr, flush=True)


def _claimed_process(content: bytes) -> str:
    """Which process the writer of a registration claims to be, in words; anybody may have written it."""
    try:
        info = json.loads(content)
        return f" (process {int(info['process']['pid'])} on {ascii(info['name'])[:80]})"
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def _run_id(environment: Environment, store: Store) -> str:
    """The engine's run id; if the user gave none, a random one, set for all by the rank that comes first."""
    if environment.run_id != _NO_RUN_ID:
        return environment.run_id
    run_id = store.compare_set("murmurate/run_id", "", secrets.token_hex(8)).decode(errors="replace")
    if not re.fullmatch("[0-9a-f]{16}", run_id):
        raise Refusal(f"a stranger has written {ascii(run_id)[:80]} into the store as the run's id. {SET_IT}")
    return run_id


def _place(run_id: str) -> str:
    return f"murmurate/{urllib.parse.quote(run_id, safe='')}"


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
            "MASTER_ADDR and MASTER_PORT must lead to the first host from every host; torchrun sets the "
            "former to its option --local-addr on the first host, by default to that host's name."
        ) from error
