"""Collectives: engines carry the rounds in which nobody is lost, the lowest living member the others.

An engine (``reduce_scatter``, ``process_group``) gives all its members the same bits, but when one is lost
some may have a result and others not. So each member keeps the last result it got. Who gets none asks all
others to do the round again: who has its result gives it, and all others leave the engine and give their
vectors to the lowest living member. That one waits for all who live, settles who took part, and tells the
rest. When it dies, each gives the last result, and its own part of the present round, to the next lowest;
that one finds the result too if any living member has it.

A member that was frozen may find the others' parts when it goes on, though they have left it out. So a result
counts only as long as nobody can have left us out: see ``_lease_seconds``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from murmurate.buffers import as_tensor
from murmurate.fabric.interface import FabricError, Traffic
from murmurate.fabric.mean import ordered_mean
from murmurate.fabric.network.endpoint import Endpoint
from murmurate.fabric.network.engine import Attempt
from murmurate.fabric.network.frames import Frame, Kind, Refused
from murmurate.fabric.network.process_group import DTYPES, ProcessGroups
from murmurate.fabric.network.reduce_scatter import ACTS, ReduceScatter
from murmurate.fabric.network.round import Memory, Part, Result

_LEAST_BYTES = 256 << 10  # of a vector for which an engine is worth its messages
_LATE_SECONDS = 1.0  # how much longer than its own deadline a member waits for the leader's to come


class NetworkCollectives:
    """One channel's collectives at one member."""

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        identity: bytes,
        group: Sequence[int],
        count: int,
        dtype: torch.dtype,
        traffic: Traffic,
        version: Callable[[], int],
    ) -> None:
        self._endpoint, self._name, self._identity = endpoint, name, identity
        self.dtype, self._bytes = dtype, count * dtype.itemsize
        self._traffic, self._version = traffic, version
        self._memory = Memory(set(group))
        self._misfit = ""
        self._connections = ReduceScatter(endpoint, identity, count, dtype, traffic)
        # others leave us out after half of the deadline, and may have heard us last so much earlier
        self._lease_seconds = endpoint.deadline_seconds / 2 - endpoint.credentials.silence_seconds
        self._groups: ProcessGroups | None = None
        if not endpoint.credentials.encrypt and dtype in DTYPES and self._lease_seconds > 0:
            self._groups = ProcessGroups(endpoint, identity, self._lease_seconds, dtype, traffic)

    def meet(self, call: str, x: Tensor | None) -> Result:
        """Bring ``x`` [N] to the next round and wait for its result (without the lock)."""
        endpoint, memory = self._endpoint, self._memory
        end = time.monotonic() + endpoint.deadline_seconds
        if x is not None:
            x = x.detach().reshape(-1).to("cpu", self.dtype)
        with endpoint.lock:
            memory.round, memory.call = memory.round + 1, call
            members = sorted(memory.members)
        result = None
        able = self._lease_seconds > 0 and (call != "mean" or self.dtype.is_floating_point)
        if able and self._bytes >= _LEAST_BYTES and len(members) > 1:
            result = self._by_engine(memory.round, call, x, members)
        if result is None:
            result = self._by_leader(memory.round, call, x, end)
        with endpoint.lock:
            for old in [r for r in memory.parts if r < memory.round]:
                del memory.parts[old]
        return result

    def _by_engine(self, turn: int, call: str, x: Tensor | None, members: list[int]) -> Result | None:
        """None if it has to be done by the leader; then all know."""
        endpoint, memory = self._endpoint, self._memory
        end = time.monotonic() + self._lease_seconds

        def void() -> bool:
            since = (self._groups and self._groups.since) or turn
            asked = any(memory.again.get(rank, 0) >= since for rank in members)
            late = time.monotonic() > end
            return asked or late or bool(self._misfit) or not memory.members.issuperset(members)

        ended: list[float] = []  # since when somebody has been finished

        def hopeless() -> bool:
            if void() or any(endpoint.dead(rank) for rank in members):
                return True
            if any(self._gone(rank) for rank in members):
                ended.append(time.monotonic())
            # who finishes may have come to this round, and what it sent last may be on its way
            return bool(ended) and time.monotonic() - ended[0] > _LATE_SECONDS

        attempt = Attempt(endpoint.rank, turn, call, members, x, self._version(), hopeless)
        carried = None
        with contextlib.suppress(RuntimeError):  # gloo's
            engine = (
                self._connections if self._groups is None or not self._groups.make(attempt) else self._groups
            )
            carried = (engine if call == "mean" else self._connections).carry(attempt)
        with endpoint.lock:
            reached = all(endpoint.connections[rank].connected or self._gone(rank) for rank in attempt.others)
            if carried is not None and reached and not void():
                memory.last = Result(turn, call, members, carried.parts, carried.versions, carried.divisor)
                return memory.last
            memory.asked = turn
            for rank in attempt.others:
                self._say(rank, turn, "again")
        if self._groups is not None:
            self._groups.drop()
        return None

    def _by_leader(self, turn: int, call: str, x: Tensor | None, end: float) -> Result:
        own = None
        if x is not None:
            own = self._endpoint.parts.take(self._bytes)
            as_tensor(own, self.dtype).copy_(x)
        endpoint, memory = self._endpoint, self._memory
        with endpoint.lock:
            part = Part(call, own, self._version())
            state = {"given_to": None}

            def done() -> bool:
                self._step(turn, part, state)
                return self._has(turn) or turn in memory.failed or bool(self._misfit)

            if not endpoint.wait(done, end - time.monotonic()):
                self._give_up(turn)
                endpoint.wait(done, _LATE_SECONDS)
            if self._misfit or not self._has(turn):
                raise FabricError(
                    self._misfit or memory.failed.get(turn) or self._missing(turn, self._silent(turn))
                )
            if memory.last is None or endpoint.rank not in memory.last.who:
                raise FabricError(self._left_out(endpoint.rank))
            return memory.last

    def fail(self, words: str) -> None:
        """The members do not fit together: no round can end well."""
        self._misfit = words
        self._endpoint.notify()

    # -- a member's part (all with the lock held) ---------------------------------------------------

    def _has(self, turn: int) -> bool:
        return self._memory.last is not None and self._memory.last.round == turn

    def _leader(self) -> int:
        return min(rank for rank in self._memory.members if not self._out(rank))

    def _out(self, rank: int) -> bool:
        """Gone, or out of reach for long while most of the members, or half with the lowest, are not.

        So at most one side of a cut goes on without the other.
        """
        endpoint, members = self._endpoint, self._memory.members
        if self._gone(rank):
            return True
        if not endpoint.out_of_reach(rank):
            return False
        here = [r for r in members if not self._gone(r) and not endpoint.out_of_reach(r)]
        there = [r for r in members if not self._gone(r) and endpoint.out_of_reach(r)]
        return len(here) > len(there) or (len(here) == len(there) and min(here) < min(there))

    def _gone(self, rank: int) -> bool:
        """Dead, or finished; not before it has said whether it has the result that we asked for."""
        endpoint, memory = self._endpoint, self._memory
        if not endpoint.gone(rank) or memory.asked < memory.round or endpoint.dead(rank):
            return endpoint.gone(rank)
        return memory.behind.get(rank) == memory.round or not endpoint.connections[rank].connected

    def _step(self, turn: int, part: Part, state: dict[str, Any]) -> None:
        """Give our part to the present leader, or, if we are it, settle the round once all have come."""
        memory, endpoint = self._memory, self._endpoint
        if self._has(turn):
            return
        leader = self._leader()
        if leader != state["given_to"]:
            if leader == endpoint.rank:
                memory.parts.setdefault(turn, {})[endpoint.rank] = part
            else:
                if memory.leader not in (None, leader) and memory.last is not None:
                    self._post(leader, memory.last)  # the former leader may have told only us
                self._give(leader, turn, part)
            state["given_to"] = memory.leader = leader
        if leader == endpoint.rank:
            self._settle(turn)

    def _give(self, leader: int, turn: int, part: Part) -> None:
        meta = {"act": "part", "call": part.call, "published": part.version}
        self._traffic.bytes += 0 if part.x is None else part.x.nbytes
        frame = Frame(Kind.ROUND, self._identity, version=turn, meta=meta, payload=part.x)
        self._endpoint.connections[leader].post(frame)

    def _silent(self, turn: int) -> list[int]:
        memory = self._memory
        if memory.leader != self._endpoint.rank:
            return [] if memory.leader is None else [memory.leader]
        come = memory.parts.get(turn, {})
        return sorted(r for r in memory.members if r not in come and not self._out(r))

    def _missing(self, turn: int, silent: list[int]) -> str:
        return (
            f"rank(s) {silent} did not come to round {turn} of channel '{self._name}' within "
            f"{self._endpoint.deadline_seconds:g} s. They live but do not answer: look at their logs."
        )

    def _left_out(self, rank: int) -> str:
        return (
            f"rank {rank} was left out of channel '{self._name}' when it could not be reached; it cannot "
            "come back into its collectives in this epoch. Go on from the last checkpoint."
        )

    def _give_up(self, turn: int) -> None:
        """At the deadline the leader tells who is missing; the others have but to wait for it."""
        memory = self._memory
        if memory.leader == self._endpoint.rank and not self._has(turn):
            memory.failed[turn] = self._missing(turn, self._silent(turn))
            for rank in memory.parts.get(turn, {}):
                self._fail(rank, turn, memory.failed[turn])

    def _fail(self, rank: int, turn: int, words: str) -> None:
        self._say(rank, turn, "failed", why=words)

    def _say(self, rank: int, turn: int, act: str, **more: str) -> None:
        if rank != self._endpoint.rank:
            frame = Frame(Kind.ROUND, self._identity, version=turn, meta={"act": act, **more})
            self._endpoint.connections[rank].post(frame)

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

    def _result(self, turn: int, come: dict[int, Part]) -> Result:
        call, who = come[self._endpoint.rank].call, sorted(come)
        given = {rank: part.x for rank, part in come.items() if part.x is not None}
        parts: Any = None
        if call == "mean" and len(given) == 1:
            parts = given[who[0]]
        elif call == "mean":
            parts = self._endpoint.parts.take(self._bytes)
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
            if rank != self._endpoint.rank:
                self._post(rank, result)
        self._endpoint.notify()

    def _post(self, to: int, result: Result) -> None:
        result.divide(self.dtype)
        meta = {
            "act": "result",
            "call": result.call,
            "who": result.who,
            "published": [result.versions[rank] for rank in result.who],
        }
        self._traffic.bytes += 0 if result.parts is None else memoryview(result.parts).nbytes
        frame = Frame(Kind.ROUND, self._identity, version=result.round, meta=meta, payload=result.parts)
        self._endpoint.connections[to].post(frame)

    def _take(self, result: Result) -> None:
        self._memory.last = result
        self._memory.members = set(result.who)

    # -- what comes ---------------------------------------------------------------------------------

    def hear(self, what: tuple[str, ...], value: str) -> None:
        """A member's word for a process group."""
        if self._groups is not None:
            self._groups.hear(what, value)
        self._endpoint.notify()

    def fits(self, frame: Frame, length: int) -> None:
        fits = length == self._bytes or (frame.meta.get("act") in ACTS and length < self._bytes)
        if frame.meta.get("act") == "result" and frame.meta.get("call") == "gather":
            fits = length == self._bytes * len(_ranks(frame.meta.get("who"), self._endpoint.size))
        if not fits:
            raise Refused("length", f"{length} bytes in a round of vectors of {self._bytes}")

    def deliver(self, sender: int, frame: Frame) -> None:
        act, turn, memory = frame.meta.get("act"), frame.version, self._memory
        self._traffic.bytes += frame.length
        if act == "part":
            self._part_came(sender, turn, frame)
        elif act in ACTS:
            self._piece_came(sender, turn, frame)
        elif act == "again":
            self._asked_again(sender, turn)
        elif act == "behind":
            memory.behind[sender] = turn
        elif act == "failed":
            memory.failed[turn] = str(frame.meta.get("why"))
        elif act == "result":
            who = _ranks(frame.meta.get("who"), self._endpoint.size)
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
        part = Part(str(frame.meta.get("call")), frame.payload, int(frame.meta.get("published", 0)))
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

    def _piece_came(self, sender: int, turn: int, frame: Frame) -> None:
        if turn > self._memory.round + 1:
            raise Refused("number", f"a piece of round {turn} in round {self._memory.round}")
        if turn == self._memory.round + 1 or (turn == self._memory.round and not self._has(turn)):
            self._connections.arrived(sender, frame)
        if turn == self._memory.round and frame.meta.get("call") != self._memory.call:
            self._memory.again[sender] = turn  # the leader will say what does not fit

    def _asked_again(self, sender: int, turn: int) -> None:
        """An engine has given ``sender`` no result of that round."""
        memory, groups = self._memory, self._groups
        if sender not in memory.members:
            self._fail(sender, turn, self._left_out(sender))
            return
        memory.again[sender] = turn
        idle = memory.last is not None and memory.last.round == memory.round
        if groups is not None and idle and turn >= groups.since:
            groups.drop()
        if memory.last is not None and memory.last.round == turn:
            self._post(sender, memory.last)
        elif turn > memory.round:
            self._say(sender, turn, "behind")

    def returned(self, peer: int) -> None:
        """Who was started anew has lost count of the rounds, and stays out of them."""
        self._memory.members.discard(peer)
        for parts in self._memory.parts.values():
            parts.pop(peer, None)


def _ranks(value: Any, size: int) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(r, int) and 0 <= r < size for r in value):
        raise Refused("meta", "a result without a list of those who took part")
    return value
