"""Collectives over links: the lowest living member gathers, settles who took part, and tells the rest.

One member computes, so all get the same bits and agree on who is in them. It stays so when that member
dies: each member keeps the last result it got, and gives it, with its own part of the present round, to
the next lowest; that one waits for all who live, and so finds the result if any living member has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from murmurate.buffers import Bytes, as_tensor
from murmurate.fabric.interface import FabricError, Traffic
from murmurate.fabric.mean import ordered_mean
from murmurate.fabric.network.endpoint import Hub
from murmurate.fabric.network.frames import Frame, Kind, Refused

_LATE_SECONDS = 1.0  # how much longer than its own deadline a member waits for the leader's to come


@dataclass
class Result:
    """who: took part. parts: the vectors [N] that come of it, one, or one for each of ``who``."""

    round: int
    call: str
    who: list[int]
    parts: Any  # a buffer of all of them, in order; None if there is nothing
    versions: dict[int, int]


@dataclass
class _Part:
    call: str
    x: Bytes | None
    version: int


@dataclass
class _Memory:
    """What one member knows of the rounds of one channel."""

    members: set[int]
    round: int = 0
    leader: int | None = None
    last: Result | None = None
    parts: dict[int, dict[int, _Part]] = field(default_factory=dict)  # as leader: by round, by rank
    failed: dict[int, str] = field(default_factory=dict)


class Rounds:
    """One channel's collectives at one member."""

    def __init__(
        self,
        hub: Hub,
        name: str,
        identity: bytes,
        group: Sequence[int],
        count: int,
        dtype: torch.dtype,
        traffic: Traffic,
        version: Callable[[], int],
    ) -> None:
        self._hub, self._name, self._identity = hub, name, identity
        self.dtype, self._bytes = dtype, count * dtype.itemsize
        self._traffic, self._version = traffic, version
        self._memory = _Memory(set(group))
        self._misfit = ""

    def meet(self, call: str, x: Tensor | None) -> Result:
        """Bring ``x`` [N] to the next round and wait for its result (without the lock)."""
        own = None
        if x is not None:
            own = self._hub.parts.take(self._bytes)
            as_tensor(own, self.dtype).copy_(x.detach().reshape(-1))
        hub, memory = self._hub, self._memory
        with hub.lock:
            memory.round += 1
            turn = memory.round
            part = _Part(call, own, self._version())
            state = {"given_to": None}

            def done() -> bool:
                self._step(turn, part, state)
                return self._has(turn) or turn in memory.failed or bool(self._misfit)

            if not hub.wait(done, hub.deadline_seconds):
                self._give_up(turn)
                hub.wait(done, _LATE_SECONDS)
            if self._misfit or not self._has(turn):
                raise FabricError(
                    self._misfit or memory.failed.get(turn) or self._missing(turn, self._silent(turn))
                )
            if memory.last is None or hub.rank not in memory.last.who:
                raise FabricError(self._left_out(hub.rank))
            for old in [r for r in memory.parts if r < turn]:
                del memory.parts[old]
            return memory.last

    def fail(self, words: str) -> None:
        """The members do not fit together: no round can end well."""
        self._misfit = words
        self._hub.notify()

    # -- a member's part (all with the lock held) ---------------------------------------------------

    def _has(self, turn: int) -> bool:
        return self._memory.last is not None and self._memory.last.round == turn

    def _leader(self) -> int:
        return min(rank for rank in self._memory.members if not self._out(rank))

    def _out(self, rank: int) -> bool:
        """Gone, or out of reach for long while most of the members, or half with the lowest, are not.

        So at most one side of a cut goes on without the other.
        """
        hub, members = self._hub, self._memory.members
        if hub.gone(rank):
            return True
        if not hub.out_of_reach(rank):
            return False
        here = [r for r in members if not hub.gone(r) and not hub.out_of_reach(r)]
        there = [r for r in members if not hub.gone(r) and hub.out_of_reach(r)]
        return len(here) > len(there) or (len(here) == len(there) and min(here) < min(there))

    def _step(self, turn: int, part: _Part, state: dict[str, Any]) -> None:
        """Give our part to the present leader, or, if we are it, settle the round once all have come."""
        memory, hub = self._memory, self._hub
        if self._has(turn):
            return
        leader = self._leader()
        if leader != state["given_to"]:
            if leader == hub.rank:
                memory.parts.setdefault(turn, {})[hub.rank] = part
            else:
                if memory.leader not in (None, leader) and memory.last is not None:
                    self._post(leader, memory.last)  # the former leader may have told only us
                self._give(leader, turn, part)
            state["given_to"] = memory.leader = leader
        if leader == hub.rank:
            self._settle(turn)

    def _give(self, leader: int, turn: int, part: _Part) -> None:
        meta = {"act": "part", "call": part.call, "published": part.version}
        self._traffic.bytes += 0 if part.x is None else part.x.nbytes
        frame = Frame(Kind.ROUND, self._identity, version=turn, meta=meta, payload=part.x)
        self._hub.links[leader].post(frame)

    def _silent(self, turn: int) -> list[int]:
        memory = self._memory
        if memory.leader != self._hub.rank:
            return [] if memory.leader is None else [memory.leader]
        come = memory.parts.get(turn, {})
        return sorted(r for r in memory.members if r not in come and not self._out(r))

    def _missing(self, turn: int, silent: list[int]) -> str:
        return (
            f"rank(s) {silent} did not come to round {turn} of channel '{self._name}' within "
            f"{self._hub.deadline_seconds:g} s. They live but do not answer: look at their logs."
        )

    def _left_out(self, rank: int) -> str:
        return (
            f"rank {rank} was left out of channel '{self._name}' when it could not be reached; it cannot "
            "come back into its collectives in this epoch. Go on from the last checkpoint."
        )

    def _give_up(self, turn: int) -> None:
        """At the deadline the leader tells who is missing; the others have but to wait for it."""
        memory = self._memory
        if memory.leader == self._hub.rank and not self._has(turn):
            memory.failed[turn] = self._missing(turn, self._silent(turn))
            for rank in memory.parts.get(turn, {}):
                self._fail(rank, turn, memory.failed[turn])

    def _fail(self, rank: int, turn: int, words: str) -> None:
        if rank != self._hub.rank:
            meta = {"act": "failed", "why": words}
            frame = Frame(Kind.ROUND, self._identity, version=turn, meta=meta)
            self._hub.links[rank].post(frame)

    # -- the leader's part --------------------------------------------------------------------------

    def _settle(self, turn: int) -> None:
        memory = self._memory
        come = memory.parts[turn]
        if any(r not in come and not self._out(r) for r in memory.members) or turn in memory.failed:
            return
        come = {rank: part for rank, part in come.items() if rank in memory.members}
        calls = {rank: part.call for rank, part in come.items()}
        if len(set(calls.values())) > 1:
            memory.failed[turn] = (
                f"round {turn} of channel '{self._name}' got different calls, by rank: {calls}. "
                "Make the same calls in the same order on all members."
            )
            for rank in come:
                self._fail(rank, turn, memory.failed[turn])
            return
        self._tell(self._result(turn, come))

    def _result(self, turn: int, come: dict[int, _Part]) -> Result:
        call, who = come[self._hub.rank].call, sorted(come)
        given = {rank: part.x for rank, part in come.items() if part.x is not None}
        parts: Any = None
        if call == "mean" and len(given) == 1:
            parts = given[who[0]]
        elif call == "mean":
            parts = self._hub.parts.take(self._bytes)
            vectors = {rank: as_tensor(x, self.dtype) for rank, x in given.items()}
            as_tensor(parts, self.dtype).copy_(ordered_mean(vectors))
        elif call.startswith("broadcast"):
            parts = given.get(int(call.split()[1]))
        else:
            parts = torch.cat([as_tensor(given[rank], self.dtype) for rank in who]).view(torch.uint8).numpy()
        return Result(turn, call, who, parts, {rank: part.version for rank, part in come.items()})

    def _tell(self, result: Result) -> None:
        self._take(result)
        for rank in self._memory.parts.get(result.round, {}):
            if rank != self._hub.rank:
                self._post(rank, result)
        self._hub.notify()

    def _post(self, to: int, result: Result) -> None:
        meta = {
            "act": "result",
            "call": result.call,
            "who": result.who,
            "published": [result.versions[rank] for rank in result.who],
        }
        self._traffic.bytes += 0 if result.parts is None else memoryview(result.parts).nbytes
        frame = Frame(Kind.ROUND, self._identity, version=result.round, meta=meta, payload=result.parts)
        self._hub.links[to].post(frame)

    def _take(self, result: Result) -> None:
        self._memory.last = result
        self._memory.members = set(result.who)

    # -- what comes ---------------------------------------------------------------------------------

    def fits(self, frame: Frame, length: int) -> None:
        fits = length == self._bytes
        if frame.meta.get("act") == "result" and frame.meta.get("call") == "gather":
            fits = length == self._bytes * len(_ranks(frame.meta.get("who"), self._hub.size))
        if not fits:
            raise Refused("length", f"{length} bytes in a round of vectors of {self._bytes}")

    def deliver(self, sender: int, frame: Frame) -> None:
        act, turn, memory = frame.meta.get("act"), frame.version, self._memory
        self._traffic.bytes += frame.length
        if act == "part":
            self._part_came(sender, turn, frame)
        elif act == "failed":
            memory.failed[turn] = str(frame.meta.get("why"))
        elif act == "result":
            who = _ranks(frame.meta.get("who"), self._hub.size)
            versions = frame.meta.get("published")
            if not isinstance(versions, list) or len(versions) != len(who):
                raise Refused("meta", "a result without the versions of those in it")
            numbers = dict(zip(who, map(int, versions), strict=True))
            result = Result(turn, str(frame.meta.get("call")), who, frame.payload, numbers)
            if turn == memory.round and not self._has(turn):
                self._tell(result)  # passes it on, if we lead by now and others wait for it
        else:
            raise Refused("meta", f"a round's message that wants '{act}'")

    def _part_came(self, sender: int, turn: int, frame: Frame) -> None:
        memory = self._memory
        part = _Part(str(frame.meta.get("call")), frame.payload, int(frame.meta.get("published", 0)))
        if sender not in memory.members:
            self._fail(sender, turn, self._left_out(sender))
        elif turn in memory.failed:
            self._fail(sender, turn, memory.failed[turn])
        elif memory.last is not None and turn == memory.last.round:
            self._post(sender, memory.last)
        elif memory.round <= turn <= memory.round + 1 or turn == memory.round:
            memory.parts.setdefault(turn, {})[sender] = part
        elif turn < memory.round:
            self._fail(sender, turn, f"round {turn} of channel '{self._name}' is over long since")
        else:
            raise Refused("number", f"a part for round {turn} in round {memory.round}")

    def returned(self, peer: int) -> None:
        """Who was started anew has lost count of the rounds, and stays out of them."""
        self._memory.members.discard(peer)
        for parts in self._memory.parts.values():
            parts.pop(peer, None)


def _ranks(value: Any, size: int) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(r, int) and 0 <= r < size for r in value):
        raise Refused("meta", "a result without a list of those who took part")
    return value
