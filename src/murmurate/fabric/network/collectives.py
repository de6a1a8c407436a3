"""Collectives. A *round* is one collective call by all members. Engines execute rounds of long vectors in
which no member is lost; a leader executes all other rounds.

An engine (``reduce_scatter``, ``process_group``) gives all members bitwise the same result, but if a member
is lost, some may get a result and others none. So each member keeps its last result. A member that gets none
asks all others to repeat the round: those that have the result send it; the others leave the engine and send
their vectors to the leader, the lowest living member. The leader waits for all living members, decides who
took part, and sends the result to all. When the leader dies, each member sends its last result, and its
vector of the present round, to the next leader: so a result is not lost while any living member has it.

A frozen member may wake up and compute a result from vectors that have arrived, although the others have
excluded it. So a member accepts an engine's result only for ``_lease_seconds`` from the start of the round:
until these have passed, no other member can have excluded it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from murmurate.buffers import as_tensor
from murmurate.fabric.interface import STILL_ALIVE, FabricError, Traffic
from murmurate.fabric.mean import ordered_mean
from murmurate.fabric.network.endpoint import Endpoint
from murmurate.fabric.network.engine import Attempt, Engine
from murmurate.fabric.network.frames import Frame, FrameRejected, Kind
from murmurate.fabric.network.process_group import DTYPES, ProcessGroups
from murmurate.fabric.network.reduce_scatter import PIECE_ACTS, ReduceScatter
from murmurate.fabric.network.round import RoundInput, RoundResult, RoundState, member_ranks

_MIN_ENGINE_BYTES = 256 << 10  # smaller vectors go through the leader, which needs fewer messages
# how long to wait for the leader's result after the deadline, and for a finished member's frames in flight
_GRACE_SECONDS = 1.0


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
        self._state = RoundState(set(group))
        self._mismatch = ""
        self._reduce_scatter = ReduceScatter(endpoint, identity, count, dtype, traffic)
        # the others exclude this member after half of the deadline, counted from its last sign of life
        self._lease_seconds = endpoint.deadline_seconds / 2 - endpoint.credentials.silence_seconds
        self._groups: ProcessGroups | None = None
        if not endpoint.credentials.encrypt and dtype in DTYPES and self._lease_seconds > 0:
            self._groups = ProcessGroups(endpoint, identity, self._lease_seconds, dtype, traffic)

    def run(self, call: str, x: Tensor | None) -> RoundResult:
        """Contribute ``x`` [N] to the next round, without the lock; give its result. Raises FabricError."""
        endpoint, state = self._endpoint, self._state
        end = time.monotonic() + endpoint.deadline_seconds
        if x is not None:
            x = x.detach().reshape(-1).to("cpu", self.dtype)
        with endpoint.lock:
            state.round, state.call = state.round + 1, call
            members = sorted(state.members)
        result = None
        engine_allowed = self._lease_seconds > 0 and (call != "mean" or self.dtype.is_floating_point)
        if engine_allowed and self._bytes >= _MIN_ENGINE_BYTES and len(members) > 1:
            result = self._by_engine(state.round, call, x, members)
            # the engine may take the time of the lease; while this process was stopped, none passed
            end = max(end, time.monotonic() + endpoint.deadline_seconds - self._lease_seconds)
        if result is None:
            result = self._by_leader(state.round, call, x, end)
        with endpoint.lock:
            for old in [r for r in state.contributions if r < state.round]:
                del state.contributions[old]
        return result

    def _by_engine(self, number: int, call: str, x: Tensor | None, members: list[int]) -> RoundResult | None:
        """The result; None if the leader must execute the round: all members have then been notified."""
        endpoint, state = self._endpoint, self._state
        lease_end = time.monotonic() + self._lease_seconds

        def is_void() -> bool:
            """Whether an engine's result of this round must not be accepted."""
            oldest = (self._groups and self._groups.since) or number  # the round that made the process group
            repeated = any(state.repeat.get(rank, 0) >= oldest for rank in members)
            late = time.monotonic() > lease_end
            return repeated or late or bool(self._mismatch) or not state.members.issuperset(members)

        finished_at: list[float] = []  # when a member was first seen to have finished

        def should_abort() -> bool:
            if is_void() or any(endpoint.dead(rank) for rank in members):
                return True
            if any(self._is_gone(rank) for rank in members):
                finished_at.append(time.monotonic())
            # a member that has finished may have taken part in this round, with its last frames in flight
            return bool(finished_at) and time.monotonic() - finished_at[0] > _GRACE_SECONDS

        attempt = Attempt(endpoint.rank, number, call, members, x, self._version(), should_abort)
        result = None
        with contextlib.suppress(RuntimeError):  # raised by gloo
            engine: Engine = self._reduce_scatter
            if self._groups is not None and self._groups.make(attempt) and call == "mean":
                engine = self._groups
            result = engine.execute(attempt)
        with endpoint.lock:
            all_in_reach = all(
                endpoint.connections[rank].connected or self._is_gone(rank) for rank in attempt.others
            )
            if result is not None and all_in_reach and not is_void():
                state.last = RoundResult(number, call, members, result.data, result.versions, result.divisor)
                return state.last
            state.repeat_asked = number
            for rank in attempt.others:
                self._notify(rank, number, "again")
        if self._groups is not None:
            self._groups.drop()
        return None

    def _by_leader(self, number: int, call: str, x: Tensor | None, end: float) -> RoundResult:
        """The result of the round that the leader (this member or another) executes. Raises FabricError."""
        copied = None
        if x is not None:
            copied = self._endpoint.shared_buffers.take(self._bytes)
            as_tensor(copied, self.dtype).copy_(x)
        endpoint, state = self._endpoint, self._state
        with endpoint.lock:
            part = RoundInput(call, copied, self._version())
            leaders: list[int] = []  # those to which our part was sent

            def done() -> bool:
                self._advance(number, part, leaders)
                return bool(self._result_of(number) or number in state.failed or self._mismatch)

            if not endpoint.wait_for(state.members, done, end):
                self._expire(number)
                endpoint.wait(done, _GRACE_SECONDS)
            result = self._result_of(number)
            if self._mismatch or result is None:
                missing = self._missing_message(number, self._silent(number))
                raise FabricError(self._mismatch or state.failed.get(number) or missing)
            if endpoint.rank not in result.members:
                raise FabricError(self._left_out_message(endpoint.rank))
            return result

    def fail_all_rounds(self, sentence: str) -> None:
        """Let every round fail from now on, with this message: the members' channels do not match."""
        self._mismatch = sentence
        self._endpoint.notify()

    # -- as a member (all with the lock held) -------------------------------------------------------

    def _result_of(self, number: int) -> RoundResult | None:
        """The result of round ``number``, if that is the last one with a result."""
        last = self._state.last
        return last if last is not None and last.round == number else None

    def _leader(self) -> int:
        return min(rank for rank in self._state.members if not self._is_excluded(rank))

    def _is_excluded(self, rank: int) -> bool:
        """Whether ``rank`` is gone, or has long been out of reach while we reach a majority of the members.
        Of two halves, the one with the lowest rank counts as the majority.

        So at most one side of a partition continues without the other.
        """
        endpoint, members = self._endpoint, self._state.members
        if self._is_gone(rank):
            return True
        if not endpoint.out_of_reach(rank):
            return False
        near = [r for r in members if not self._is_gone(r) and not endpoint.out_of_reach(r)]
        far = [r for r in members if not self._is_gone(r) and endpoint.out_of_reach(r)]
        return len(near) > len(far) or (len(near) == len(far) and min(near) < min(far))

    def _is_gone(self, rank: int) -> bool:
        """Whether ``rank`` cannot send the round's result any more, as it is dead or has finished. A finished
        member that we asked for the result is gone once it answers that it has none, or is disconnected."""
        endpoint, state = self._endpoint, self._state
        if not endpoint.gone(rank) or state.repeat_asked < state.round or endpoint.dead(rank):
            return endpoint.gone(rank)
        return state.not_reached.get(rank) == state.round or not endpoint.connections[rank].connected

    def _advance(self, number: int, part: RoundInput, leaders: list[int]) -> None:
        """Send our part to the present leader, unless that was done (it is the last of ``leaders``); as the
        leader, complete the round once all parts have arrived."""
        state, endpoint = self._state, self._endpoint
        if self._result_of(number):
            return
        leader = self._leader()
        if leader not in leaders[-1:]:
            if leader == endpoint.rank:
                state.contributions.setdefault(number, {})[endpoint.rank] = part
            else:
                if state.leader not in (None, leader) and state.last is not None:
                    self._send_result(leader, state.last)  # the former leader may have sent it to us alone
                self._contribute(leader, number, part)
            leaders.append(leader)
            state.leader = leader
        if leader == endpoint.rank:
            self._complete(number)

    def _contribute(self, leader: int, number: int, part: RoundInput) -> None:
        meta = {"act": "part", "call": part.call, "published": part.version}
        self._traffic.bytes += 0 if part.x is None else part.x.nbytes
        frame = Frame(Kind.ROUND, self._identity, version=number, meta=meta, payload=part.x)
        self._endpoint.connections[leader].post(frame)

    def _silent(self, number: int) -> list[int]:
        """For the leader: the members that have not sent their part. For all others: the leader."""
        state = self._state
        if state.leader != self._endpoint.rank:
            return [] if state.leader is None else [state.leader]
        arrived = state.contributions.get(number, {})
        return sorted(r for r in state.members if r not in arrived and not self._is_excluded(r))

    def _missing_message(self, number: int, silent: list[int]) -> str:
        return (
            f"rank(s) {silent} did not join round {number} of channel '{self._name}' within "
            f"{self._endpoint.deadline_seconds:g} s. {STILL_ALIVE}"
        )

    def _left_out_message(self, rank: int) -> str:
        return (
            f"rank {rank} was left out of channel '{self._name}' when it could not be reached; it cannot "
            "take part in its collectives again in this epoch. Go on from the last checkpoint."
        )

    def _expire(self, number: int) -> None:
        """At the deadline: the leader tells all contributors which members are missing. (Contributors wait
        for that message.)"""
        state = self._state
        if state.leader == self._endpoint.rank and not self._result_of(number):
            state.failed[number] = self._missing_message(number, self._silent(number))
            for rank in state.contributions.get(number, {}):
                self._tell_failed(rank, number, state.failed[number])

    def _tell_failed(self, rank: int, number: int, sentence: str) -> None:
        self._notify(rank, number, "failed", why=sentence)

    def _notify(self, rank: int, number: int, act: str, **more: str) -> None:
        if rank != self._endpoint.rank:
            frame = Frame(Kind.ROUND, self._identity, version=number, meta={"act": act, **more})
            self._endpoint.connections[rank].post(frame)

    # -- as the leader ------------------------------------------------------------------------------

    def _complete(self, number: int) -> None:
        state = self._state
        parts = state.contributions[number]
        if any(r not in parts and not self._is_excluded(r) for r in state.members) or number in state.failed:
            return
        parts = {rank: part for rank, part in parts.items() if rank in state.members}
        calls = {rank: part.call for rank, part in parts.items()}
        if len(set(calls.values())) > 1:
            state.failed[number] = (
                f"round {number} of channel '{self._name}' got different calls, by rank: {calls}. "
                "Make the same calls in the same order on all members."
            )
            for rank in parts:
                self._tell_failed(rank, number, state.failed[number])
            return
        self._accept_result(self._result(number, parts))

    def _result(self, number: int, contributions: dict[int, RoundInput]) -> RoundResult:
        call, members = contributions[self._endpoint.rank].call, sorted(contributions)
        inputs = {rank: part.x for rank, part in contributions.items() if part.x is not None}
        data: Any = None
        if call == "mean" and len(inputs) == 1:
            data = inputs[members[0]]
        elif call == "mean":
            data = self._endpoint.shared_buffers.take(self._bytes)
            vectors = {rank: as_tensor(x, self.dtype) for rank, x in inputs.items()}
            as_tensor(data, self.dtype).copy_(ordered_mean(vectors))
        elif call.startswith("broadcast"):
            data = inputs.get(int(call.split()[1]))
        else:
            vectors_in_order = [as_tensor(inputs[rank], self.dtype) for rank in members]
            data = torch.cat(vectors_in_order).view(torch.uint8).numpy()
        versions = {rank: part.version for rank, part in contributions.items()}
        return RoundResult(number, call, members, data, versions)

    def _accept_result(self, result: RoundResult) -> None:
        """Keep a result, and pass it on to the members that have sent their part here."""
        self._state.last = result
        self._state.members = set(result.members)
        for rank in self._state.contributions.get(result.round, {}):
            if rank != self._endpoint.rank:
                self._send_result(rank, result)
        self._endpoint.notify()

    def _send_result(self, to: int, result: RoundResult) -> None:
        result = result.divided(self.dtype)
        meta = {
            "act": "result",
            "call": result.call,
            "members": result.members,
            "published": [result.versions[rank] for rank in result.members],
        }
        self._traffic.bytes += 0 if result.data is None else memoryview(result.data).nbytes
        frame = Frame(Kind.ROUND, self._identity, version=result.round, meta=meta, payload=result.data)
        self._endpoint.connections[to].post(frame)

    # -- incoming -----------------------------------------------------------------------------------

    def receive_announcement(self, key: tuple[str, ...], value: Any) -> None:
        """A member's entry for the rendezvous of a process group arrived."""
        if self._groups is not None:
            self._groups.receive_announcement(key, value)
        self._endpoint.notify()

    def check_length(self, frame: Frame, length: int) -> None:
        """Raises FrameRejected if a frame of this kind cannot have a payload of ``length`` bytes."""
        fits = length == self._bytes or (frame.meta.get("act") in PIECE_ACTS and length < self._bytes)
        if frame.meta.get("act") == "result" and frame.meta.get("call") == "gather":
            fits = length == self._bytes * len(member_ranks(frame.meta.get("members"), self._endpoint.size))
        if not fits:
            raise FrameRejected("length", f"{length} bytes in a round of vectors of {self._bytes}")

    def deliver(self, sender: int, frame: Frame) -> None:
        act, number, state = frame.meta.get("act"), frame.version, self._state
        self._traffic.bytes += frame.length
        if act == "part":
            self._receive_part(sender, number, frame)
        elif act in PIECE_ACTS:
            self._receive_piece(sender, number, frame)
        elif act == "again":
            self._receive_repeat_request(sender, number)
        elif act == "behind":
            state.not_reached[sender] = number
        elif act == "failed":
            state.failed[number] = str(frame.meta.get("why"))
        elif act == "result":
            members = member_ranks(frame.meta.get("members"), self._endpoint.size)
            versions = frame.meta.get("published")
            if not isinstance(versions, list) or len(versions) != len(members):
                raise FrameRejected("meta", "a result without its members' versions")
            numbers = dict(zip(members, map(int, versions), strict=True))
            result = RoundResult(number, str(frame.meta.get("call")), members, frame.payload, numbers)
            if number == state.round and not self._result_of(number):
                self._accept_result(result)
        else:
            raise FrameRejected("meta", f"a round's message of unknown kind '{act}'")

    def _receive_part(self, sender: int, number: int, frame: Frame) -> None:
        state = self._state
        part = RoundInput(str(frame.meta.get("call")), frame.payload, int(frame.meta.get("published", 0)))
        if sender not in state.members:
            self._tell_failed(sender, number, self._left_out_message(sender))
        elif number in state.failed:
            self._tell_failed(sender, number, state.failed[number])
        elif (result := self._result_of(number)) is not None:
            self._send_result(sender, result)
        elif state.round <= number <= state.round + 1:
            state.contributions.setdefault(number, {})[sender] = part
        elif number < state.round:
            self._tell_failed(sender, number, f"round {number} of channel '{self._name}' has long ended")
        else:
            raise FrameRejected("number", f"a part for round {number} in round {state.round}")

    def _receive_piece(self, sender: int, number: int, frame: Frame) -> None:
        if number > self._state.round + 1:
            raise FrameRejected("number", f"a piece of round {number} in round {self._state.round}")
        if number == self._state.round + 1 or (number == self._state.round and not self._result_of(number)):
            self._reduce_scatter.arrived(sender, frame)
        if number == self._state.round and frame.meta.get("call") != self._state.call:
            self._state.repeat[sender] = number  # the leader will report the difference

    def _receive_repeat_request(self, sender: int, number: int) -> None:
        """``sender`` asks us to repeat the round ``number``, as an engine gave it no result."""
        state, groups = self._state, self._groups
        if sender not in state.members:
            self._tell_failed(sender, number, self._left_out_message(sender))
            return
        state.repeat[sender] = number
        if groups is not None and self._result_of(state.round) and number >= groups.since:  # between rounds
            groups.drop()
        if (result := self._result_of(number)) is not None:
            self._send_result(sender, result)
        elif number > state.round:
            self._notify(sender, number, "behind")

    def peer_restarted(self, peer: int) -> None:
        """A restarted member does not know the state of rounds, so it takes no further part in them."""
        self._state.members.discard(peer)
        for parts in self._state.contributions.values():
            parts.pop(peer, None)
