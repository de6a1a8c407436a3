"""How ranks that an engine started find one another: rank 0 leads, the others are told what to do.

All of it goes through the c10d store that the engine's environment names. A group may be started again
under the same store, so each start is an *epoch* of its own: rank 0 draws its number, the others greet it
with a word of their own, and only a plan that repeats that word is meant for them.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
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
from murmurate.launch.host_memory import Offer, Process, borrow, lend, this_host
from murmurate.launch.job_spec import Meeting

_GATHER_SECONDS = 300.0  # imports and a first look at simulators, on a busy machine
_STORE_SECONDS = 60.0
_LOOK_SECONDS = 0.02
_COMMAND = "torchrun --nproc-per-node 2 -m murmurate train cartpole-gala --launcher torchrun"


@dataclass(frozen=True)
class Surroundings:
    """What torch elastic (or whoever sets the same variables) says about this process."""

    rank: int
    size: int
    hosts: int
    address: str
    port: int
    restarts_allowed: int
    run_id: str
    agent_store: bool

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Surroundings:
        """Raises Refusal, naming the command, in a process that nobody gave a rank."""
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
class Greeting:
    """What a rank tells the leader: its process, its host's name and address, whether it shares memory."""

    word: str
    process: Process
    name: str
    address: str
    shares: bool


@dataclass(frozen=True)
class Plan:
    """What the leader tells the others, each by the word that it greeted with."""

    words: dict[str, str]
    meeting: Meeting

    @classmethod
    def loads(cls, text: bytes) -> Plan:
        plain = json.loads(text)
        return cls(plain["words"], Meeting.restored(plain["meeting"]))


class Crew:
    """This process among the ranks of its group."""

    def __init__(self, around: Surroundings) -> None:
        self.around = around
        self.process = Process.this()
        self._root = PrefixStore(f"murmurate/{around.run_id}", _connect(around))
        self.epoch = self._root.add("epoch", 1) if self.leads else 0
        self.offer: Offer | None = None
        self.greetings: dict[int, Greeting] = {}
        self._memory_file: SharedMemoryFile | None = None

    @property
    def leads(self) -> bool:
        return self.around.rank == 0

    @property
    def store(self) -> Store:
        """The part of the store that belongs to this epoch."""
        return PrefixStore(f"epoch-{self.epoch}", self._root)

    # -- what outlives an epoch

    def begun(self) -> Path | None:
        """The run folder that rank 0 claimed in an earlier epoch of this group."""
        return Path(self._root.get("folder").decode()) if self._root.check(["folder"]) else None

    def claimed(self, folder: Path) -> None:
        self._root.set("folder", str(folder.resolve()))

    # -- the leader

    def gather(self) -> bool:
        """Offer this host's memory and wait for the others; whether all of them share it.

        Raises Refusal naming the ranks that did not come.
        """
        self._memory_file = SharedMemoryFile.create()
        self.offer = lend(self._memory_file)
        self.store.set("offer", json.dumps(dataclasses.asdict(self.offer)))
        self._root.set("current", str(self.epoch))
        until = time.monotonic() + _GATHER_SECONDS
        silent = set(range(1, self.around.size))
        while silent:
            for rank in sorted(silent):
                if self.store.check([f"greeting/{rank}"]):
                    plain = json.loads(self.store.get(f"greeting/{rank}"))
                    self.greetings[rank] = Greeting(**{**plain, "process": Process(**plain["process"])})
                    silent.remove(rank)
            if silent and time.monotonic() > until:
                raise Refusal(
                    f"ranks {sorted(silent)} did not come within {_GATHER_SECONDS:g} s. "
                    "Look at their output, and give every host the same torchrun command."
                )
            time.sleep(_LOOK_SECONDS if silent else 0)
        return self.offer.descriptor >= 0 and all(g.shares for g in self.greetings.values())

    def tell(self, meeting: Meeting) -> None:
        words = {str(rank): greeting.word for rank, greeting in self.greetings.items()}
        self.store.set("plan", json.dumps(dataclasses.asdict(Plan(words, meeting))))

    def dismiss(self, code: int, deadline_seconds: float = 5.0) -> None:
        """The others may go, with this exit code; returns once they have heard it."""
        self.store.set("over", str(code))
        until = time.monotonic() + deadline_seconds
        while time.monotonic() < until and any(not g.process.is_gone() for g in self.greetings.values()):
            if self.store.add("heard", 0) >= len(self.greetings):
                return
            time.sleep(_LOOK_SECONDS)

    def said(self, rank: int) -> str | None:
        """Why ``rank`` went, if it said so."""
        key = f"said/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    # -- the others

    def follow(self) -> Meeting:
        """Greet the leader, whichever epoch it is in, and wait for its plan. Raises Refusal."""
        word = secrets.token_hex(8)
        until = time.monotonic() + _GATHER_SECONDS
        while True:
            if self._root.check(["current"]):
                current = int(self._root.get("current"))
                if current != self.epoch:
                    self.epoch = current
                    self._greet(word)
                if self.store.check(["plan"]):
                    plan = Plan.loads(self.store.get("plan"))
                    if plan.words.get(str(self.around.rank)) == word:
                        return plan.meeting
                if self.store.check(["refused"]):
                    raise Refusal("rank 0 refused to start; it says why")
            if time.monotonic() > until:
                raise Refusal(
                    f"rank 0 did not call within {_GATHER_SECONDS:g} s. Look at its output, and give every "
                    "host the same torchrun command."
                )
            time.sleep(_LOOK_SECONDS)

    def _greet(self, word: str) -> None:
        self.offer = Offer(**json.loads(self.store.get("offer")))
        memory_file = borrow(self.offer)
        if memory_file is not None:
            memory_file.close()
        mine = Greeting(word, self.process, socket.gethostname(), self.address(), memory_file is not None)
        self.store.set(f"greeting/{self.around.rank}", json.dumps(dataclasses.asdict(mine)))

    def say(self, words: str) -> None:
        self.store.set(f"said/{self.around.rank}", words)

    def dismissed(self, leader_is_gone: Callable[[], bool]) -> int | None:
        """The exit code that the leader gives, when the last has saved; None if it is gone before."""
        while True:
            gone = leader_is_gone()
            if self.store.check(["over"]):
                code = int(self.store.get("over"))
                self.store.add("heard", 1)
                return code
            if gone:
                return None
            time.sleep(_LOOK_SECONDS)

    # -- both

    def refuse(self) -> None:
        """The leader does not begin: the others need not wait."""
        self._root.set("current", str(self.epoch))
        self.store.set("refused", "1")

    def address(self) -> str:
        """Under which the other hosts reach this one."""
        others = [g.address for g in self.greetings.values() if g.process.host != this_host()]
        return own_address(self.around.address, others)

    def close(self) -> None:
        if self._memory_file is not None:
            self._memory_file.close()


@functools.cache
def crew() -> Crew:
    """The one of this process: it has one rank. Raises Refusal."""
    return Crew(Surroundings.read(os.environ))


def _connect(around: Surroundings) -> TCPStore:
    try:
        return TCPStore(
            around.address,
            around.port,
            world_size=around.size,
            is_master=around.rank == 0 and not around.agent_store,
            timeout=datetime.timedelta(seconds=_STORE_SECONDS),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise Refusal(
            f"the store at {around.address}:{around.port} does not answer ({str(error).splitlines()[0]}). "
            "MASTER_ADDR and MASTER_PORT must lead to the first host from every host."
        ) from error


def own_address(leader: str, others: Sequence[str] = ()) -> str:
    """This host's address on the way to the leader's; MURMURATE_ADDRESS says otherwise."""
    if given := os.environ.get("MURMURATE_ADDRESS"):
        return given
    mine = _route(leader)
    if mine.startswith("127.") and others:  # the leader's own name leads to itself
        return _route(others[0])
    return mine


def _route(address: str) -> str:
    """This host's address on the way to ``address``; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
