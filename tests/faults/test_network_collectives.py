"""Vectors that engines carry: members that die, freeze, come late or disagree, what the living agree on."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import random
import signal
import threading
import time

import pytest
import torch

from fabric.networked import at_once, channels, members
from murmurate.fabric.interface import FabricError
from murmurate.fabric.network.fabric import Died, run_members
from murmurate.fabric.network.frames import Kind, Pipe
from waiting import until

WIDE = 100_000  # numbers: more than is worth the leader's way alone
ENGINES = {
    "encrypted connections": {"shared_memory": False},
    "local peers": {},
    "gloo": {"encrypt": False, "shared_memory": False},
}


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]


def draw(rank, turn, count=WIDE):
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * turn + rank))


def carried(channel, engine):
    """Whether an engine has done all so far, and that one."""
    rounds = channel._collectives
    by_group = rounds._groups is not None and rounds._groups._group is not None
    return rounds._state.repeat_asked == 0 and by_group == (engine == ENGINES["gloo"])


# -- nobody is lost -------------------------------------------------------------------------------


def all_calls(fabric):
    channel = fabric.channel("model", torch.zeros(WIDE))
    x = draw(fabric.rank, 0)
    count = channel.mean_(x)
    gathered = {rank: theirs.clone() for rank, theirs in channel.gather(draw(fabric.rank, 1)).items()}
    y = draw(fabric.rank, 2)
    channel.broadcast_(y, 1)
    channel.publish(y + fabric.rank)
    channel.mean_(torch.zeros(WIDE))
    newest = [channel.peek(peer)[0].clone() for peer in range(fabric.size)]
    z = draw(fabric.rank, 3)
    channel.mean_(z)
    return count, x, gathered, y, newest, z, [carried(channel, engine) for engine in ENGINES.values()]


@pytest.mark.parametrize("size", [2, 3])
def test_an_engine_does_what_the_leader_does(engine, size):
    results = run_members(size, [all_calls] * size, **engine)
    means = {turn: torch.stack([draw(r, turn) for r in range(size)]).double().mean(0) for turn in (0, 3)}
    for count, x, gathered, y, newest, z, by in results:
        assert count == size
        torch.testing.assert_close(x.double(), means[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(z.double(), means[3], rtol=0, atol=1e-6)
        assert torch.equal(x, results[0][1])
        assert torch.equal(z, results[0][5])
        assert [torch.equal(gathered[r], draw(r, 1)) for r in range(size)] == [True] * size
        assert torch.equal(y, draw(1, 2))
        assert [torch.equal(newest[r], y + r) for r in range(size)] == [True] * size, (
            "published before a mean"
        )
        assert dict(zip(ENGINES, by, strict=True))[next(k for k, v in ENGINES.items() if v == engine)]


def test_calls_that_differ_are_an_error_on_all(engine):
    with members(2, **engine) as fabrics:
        here, there = channels(fabrics, like=torch.zeros(WIDE))

        def words(call):
            try:
                call()
            except FabricError as error:
                return str(error)
            return "none"

        one, other = at_once(
            lambda: words(lambda: here.mean_(torch.zeros(WIDE))),
            lambda: words(lambda: there.gather(torch.zeros(WIDE))),
        )
        assert "Make the same calls" in one
        assert "Make the same calls" in other


def test_a_member_that_comes_late_is_waited_for(engine):
    """Later than an engine waits, but before the deadline."""
    with members(2, deadline_seconds=6.0, silence_seconds=1.0, **engine) as fabrics:
        here, there = channels(fabrics, like=torch.zeros(WIDE))
        x, y = torch.full((WIDE,), 1.0), torch.full((WIDE,), 2.0)

        def late():
            until(lambda: here._collectives._state.repeat_asked == 1, "the other gives up its engine")
            return there.mean_(y)

        assert at_once(lambda: here.mean_(x), late) == [2, 2]
        assert torch.equal(x, torch.full((WIDE,), 1.5))
        assert torch.equal(x, y)
        assert at_once(lambda: here.mean_(x), lambda: there.mean_(y)) == [2, 2]


class _LateWork:
    """An operation of gloo that ends just after the first wait for it has timed out."""

    def __init__(self, work):
        self._work, self._timed_out = work, False

    def is_completed(self):
        return self._timed_out and self._work.is_completed()

    def wait(self, *timeout):
        self._work.wait()
        if not self._timed_out:
            self._timed_out = True
            raise RuntimeError("Operation timed out!")
        return True


class _LateGroup:
    def __init__(self, group):
        self._group = group

    def allreduce(self, tensors):
        return _LateWork(self._group.allreduce(tensors))


def means(all_channels, count):
    """Make so many means, each of which must be right at all members."""
    for turn in range(count):
        xs = [torch.full((WIDE,), float(turn + rank)) for rank in range(len(all_channels))]
        at_once(
            *[
                lambda channel=channel, x=x: channel.mean_(x)
                for channel, x in zip(all_channels, xs, strict=True)
            ]
        )
        assert all(torch.equal(x, torch.full((WIDE,), turn + (len(all_channels) - 1) / 2)) for x in xs)


def test_an_operation_that_ends_just_after_a_poll_has_not_failed():
    with members(2, **ENGINES["gloo"]) as fabrics:
        all_channels = channels(fabrics, like=torch.zeros(WIDE))
        means(all_channels, 1)
        for channel in all_channels:
            groups = channel._collectives._groups
            groups._group = _LateGroup(groups._group)
        means(all_channels, 3)
        assert [channel._collectives._state.repeat_asked for channel in all_channels] == [0, 0]


def test_where_gloo_finds_no_device_it_is_soon_given_up(monkeypatch):
    def no_device(**_):
        raise RuntimeError("no device has this address")

    monkeypatch.setattr(torch.distributed.ProcessGroupGloo, "create_device", no_device)
    with members(2, **ENGINES["gloo"]) as fabrics:
        all_channels = channels(fabrics, like=torch.zeros(WIDE))
        means(all_channels, 8)
        assert max(channel._collectives._state.repeat_asked for channel in all_channels) < 6


def test_a_new_group_needs_no_more_memory_than_the_one_before():
    with members(2, **ENGINES["gloo"]) as fabrics:
        all_channels = channels(fabrics, like=torch.zeros(WIDE))
        kept = []
        for _ in range(3):
            means(all_channels, 1)
            kept.append([len(f.endpoint.connections[1 - f.rank].queue._state) for f in fabrics])
            assert all(carried(channel, ENGINES["gloo"]) for channel in all_channels)
            for channel in all_channels:
                channel._collectives._groups.drop()
        assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("turn", [1, 2, 4])
def test_a_member_that_loses_a_result_gets_the_one_that_others_have(engine, turn):
    """Its engine fails when the others' have ended, and they are in the next round, or at the end."""
    size, rounds = 3, 4
    with members(size, **engine) as fabrics:
        all_channels = channels(fabrics, like=torch.zeros(WIDE))
        all_channels[2].mean_, real = (
            functools.partial(type(all_channels[2]).mean_, all_channels[2]),
            all_channels[2]._collectives._by_engine,
        )

        def fails(number, call, x, present):
            result = real(number, call, x, present)
            if number != turn:
                return result
            with fabrics[2].endpoint.lock:  # as if it had not come
                all_channels[2]._collectives._state.last = None
                all_channels[2]._collectives._state.repeat_asked = number
                for rank in (0, 1):
                    all_channels[2]._collectives._notify(rank, number, "again")
            if all_channels[2]._collectives._groups is not None:
                all_channels[2]._collectives._groups.drop()
            return None

        all_channels[2]._collectives._by_engine = fails

        def learn(channel):
            found = []
            for k in range(rounds):
                x = draw(channel.rank, k)
                found.append((channel.mean_(x), x))
            return found

        one, *others = at_once(*(functools.partial(learn, channel) for channel in all_channels))
        for other in others:
            assert [count for count, _ in other] == [size] * rounds
            assert all(torch.equal(x, y) for (_, x), (_, y) in zip(one, other, strict=True))


# -- deaths ---------------------------------------------------------------------------------------


def after(share, die, seconds):
    """Die after this share of the time of a round."""
    threading.Timer(share * seconds, die).start()


def with_frames(count, die, seconds):
    """Die once ``count`` frames of this member's round are written. In a mean of n members it sends n - 1
    shares, and then its mean to n - 1 others: between two of these some have the result and others not."""
    make_writer, numbers = Pipe.writer, itertools.count(1)

    def writer(pipe, frame, *more):
        made = make_writer(pipe, frame, *more)
        if frame.kind is Kind.ROUND:
            made.write = functools.partial(write, made.write)
        return made

    def write(real, wait=True):
        is_whole = real(wait)
        if is_whole and next(numbers) == count:
            die()
        return is_whole

    Pipe.writer = writer  # in the process of the victim


def mean_until_killed(deaths, count, folder, fabric):
    """Count and bits of each round, until ten after the last death. In its eleventh round a victim begins to
    die as ``deaths`` says (``after``, ``with_frames``), by rank; if that comes between two rounds, it dies at
    once within the next. It writes "(" to its file in ``folder`` before each round, and ")" after it."""
    channel = fabric.channel("model", torch.zeros(count))
    results, left, seconds, between_rounds = [], 10, 0.0, threading.Lock()

    def die():
        between_rounds.acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    between_rounds.acquire()
    with open(folder / str(fabric.rank), "wb", buffering=0) as journal:
        for turn in itertools.count():
            x = draw(fabric.rank, turn, count)
            begun = time.perf_counter()
            if turn == 10 and fabric.rank in deaths:
                deaths[fabric.rank](die, seconds)
            journal.write(b"(")
            between_rounds.release()
            present = channel.mean_(x)
            between_rounds.acquire()
            journal.write(b")")
            seconds = time.perf_counter() - begun
            results.append((present, hashlib.sha256(x.numpy()).digest()))
            left -= present == fabric.size - len(deaths)
            if not left:
                return results, list(channel.living()), channel._collectives._state.repeat_asked


def agree(size, victims, results, folder):
    survivors = [rank for rank in range(size) if rank not in victims]
    assert len(survivors) > 1
    assert all(results[rank] == Died(rank, -signal.SIGKILL) for rank in victims)
    journals = [(folder / str(rank)).read_text() for rank in victims]
    assert all(journal.endswith("(") for journal in journals), "it died within a round"
    ended = min(journal.count(")") for journal in journals)  # rounds that all victims had ended
    assert ended >= 10
    first, _, _ = results[survivors[0]]
    for rank in survivors:
        found, living, asked = results[rank]
        assert found == first
        assert living == survivors
        assert asked <= len(first) - 5, "the last rounds were an engine's again"
    counts = [count for count, _ in first]
    assert counts[: ended - 1] == [size] * (ended - 1), (
        "of the last of these a victim may have had the result alone"
    )
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("victim", "run_state"),
    [
        pytest.param(0, True, id="first-run_state"),
        pytest.param(2, False, id="last-no run state"),
        pytest.param(2, True, id="last-run_state", marks=pytest.mark.slow),
        pytest.param(0, False, id="first-no run state", marks=pytest.mark.slow),
    ],
)
def test_the_survivors_of_a_kill_agree_bit_for_bit(engine, victim, run_state, tmp_path):
    options = engine if run_state else engine | {"run_state": None}
    role = functools.partial(mean_until_killed, {victim: functools.partial(after, 0.0)}, WIDE, tmp_path)
    agree(3, [victim], run_members(3, [role] * 3, **options), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(50))
def test_the_survivors_of_a_kill_in_the_middle_of_a_round_agree_bit_for_bit(number, tmp_path):
    """One or two of three or four die, each time by another engine and at another moment of their round: when
    some of their frames are out, so that of the others some may have the result, or at any time of gloo's."""
    generator = random.Random(number)
    size, name = generator.choice([3, 4]), generator.choice(list(ENGINES))
    victims = generator.sample(range(size), generator.randint(1, size - 2))
    deaths = {
        rank: functools.partial(after, generator.uniform(0.0, 1.0))
        if name == "gloo"
        else functools.partial(with_frames, generator.randint(1, 2 * (size - 1) - 1))
        for rank in victims
    }
    count = generator.choice([WIDE, 20 * WIDE])
    role = functools.partial(mean_until_killed, deaths, count, tmp_path)
    agree(size, victims, run_members(size, [role] * size, **ENGINES[name]), tmp_path)


# -- a member that freezes ------------------------------------------------------------------------


def freeze(fabric):
    """Rank 1 is stopped in the middle of a mean until rank 0 has done all of its own without it."""
    channel = fabric.channel("model", torch.zeros(WIDE))
    pids = fabric.channel("pids", torch.zeros(1, dtype=torch.int64)).gather(torch.tensor([os.getpid()]))
    results = []
    for turn in range(6):
        x = draw(fabric.rank, turn)
        if turn == 3 and fabric.rank == 1:
            threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        try:
            results.append((channel.mean_(x), x.numpy().tobytes()))
        except FabricError as error:
            return results, str(error)
    if fabric.rank == 0:
        os.kill(int(pids[1]), signal.SIGCONT)
    return results, ""


def test_a_frozen_member_is_left_out_and_gets_an_error(engine):
    results = run_members(3, [freeze] * 3, deadline_seconds=6.0, silence_seconds=1.0, **engine)
    (one, no_error), (frozen, error), (other, none_either) = results
    assert (no_error, none_either) == ("", "")
    assert one == other
    counts = [count for count, _ in one]
    assert counts[:3] == [3, 3, 3]
    assert counts[-1] == 2
    assert "left out" in error
    assert frozen == one[: len(frozen)], "what it had counted for all"
