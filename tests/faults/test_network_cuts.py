"""Links that are cut and come back, members that die or start anew: nothing is lost, nobody hangs."""

from __future__ import annotations

import functools
import os
import random
import signal

import pytest
import torch
import torch.distributed as dist

from fabric.networked import RUN, SECRET, N, at_once, cabled, channels, fill, members
from murmurate.fabric.interface import FabricError
from murmurate.fabric.network.fabric import Died, NetworkFabric, run_members
from waiting import DEADLINE_SECONDS, until

MESSAGES = 300


@pytest.mark.parametrize("shared_memory", [True, False])
def test_mail_arrives_once_each_in_order_though_connections_keep_ending(shared_memory):
    generator = random.Random(0)
    with cabled(shared_memory=shared_memory) as (fabrics, cable):
        here, there = channels(fabrics)

        def send(fabric, to):
            return all(fabric.send(to, "x", fill(number), note=number) for number in range(MESSAGES))

        def read(fabric, breaks):
            messages = []
            for number in range(MESSAGES):
                if breaks and generator.random() < 0.05:
                    cable.snap()
                message = fabric.wait("x", DEADLINE_SECONDS)
                assert message is not None, f"message {number} did not come"
                messages.append((message.sender, message.note, float(message.x[0])))
            return messages, fabric.receive("x")

        sent, sent_too, there_got, here_got = at_once(
            lambda: send(here, 1),
            lambda: send(there, 0),
            lambda: read(there, True),
            lambda: read(here, False),
        )
        assert sent
        assert sent_too
        assert there_got == ([(0, float(n), float(n)) for n in range(MESSAGES)], None)
        assert here_got == ([(1, float(n), float(n)) for n in range(MESSAGES)], None)
        until(lambda: fabrics[0].endpoint.connections[1].times_connected > (1 if shared_memory else 3))
        assert here.send(1, "x", fill(0))
        assert there.wait("x", DEADLINE_SECONDS) is not None
        assert there.receive("x") is None


def test_after_a_cut_the_newest_vector_and_all_messages_are_there():
    with cabled(shared_memory=False) as (fabrics, cable):
        here, there = channels(fabrics)
        here.publish(fill(1))
        assert there.wait_newer([0], [0], DEADLINE_SECONDS)
        cable.cut()
        until(lambda: list(fabrics[0].living()) == [0])
        until(lambda: list(fabrics[1].living()) == [1])
        # as long as it is away: sends are kept, reads give what there was, waiting for the silent is no use
        assert all(here.send(1, "x", fill(number)) for number in range(20))
        assert here.publish(fill(2)) == 2
        assert here.publish(fill(3)) == 3
        assert there.peek(0)[1] == 1
        assert there.wait_newer([0], [1], 30.0)
        cable.mend()
        until(lambda: list(fabrics[0].living()) == list(fabrics[1].living()) == [0, 1])
        messages = [there.wait("x", DEADLINE_SECONDS) for _ in range(20)]
        assert [float(message.x[0]) for message in messages] == [float(number) for number in range(20)]
        until(lambda: there.version(0) == 3)
        assert torch.equal(there.peek(0)[0], fill(3))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_full_queue_to_a_peer_behind_a_cut_gives_up_at_the_deadline(shared_memory):
    with cabled(shared_memory=shared_memory) as (fabrics, cable):
        here, there = channels(fabrics)
        cable.cut()
        accepted = 0
        while here.send(1, "x", fill(accepted), deadline_seconds=0.0):
            accepted += 1
            assert accepted < 1000
        assert not here.send(1, "x", fill(-1), deadline_seconds=0.05)
        cable.mend()
        got = [float(there.wait("x", DEADLINE_SECONDS).x[0]) for _ in range(accepted)]
        assert got == [float(number) for number in range(accepted)]
        until(lambda: here.send(1, "x", fill(7), deadline_seconds=0.0))


def test_a_mean_waits_out_a_cut_and_is_the_same_on_both_sides():
    with cabled() as (fabrics, cable):
        here, there = channels(fabrics)

        def rounds(fabric, value, disturb):
            results = []
            for turn in range(6):
                if turn == 3 and disturb:
                    cable.cut()
                    until(lambda: list(fabrics[0].living()) == [0])
                    cable.mend()
                x = fill(value * (turn + 1))
                results.append((fabric.mean_(x), float(x[0])))
            return results

        one, other = at_once(lambda: rounds(here, 1.0, True), lambda: rounds(there, 2.0, False))
        assert one == other == [(2, 1.5 * (turn + 1)) for turn in range(6)]


def test_a_cut_longer_than_the_deadline_leaves_one_side_only():
    with cabled(deadline_seconds=4.0) as (fabrics, cable):
        here, there = channels(fabrics)
        cable.cut()

        def mean(fabric):
            try:
                return fabric.mean_(fill(fabric.rank))
            except FabricError as error:
                return str(error)

        one, other = at_once(lambda: mean(here), lambda: mean(there))
        assert one == 1  # half of the members, with the lowest rank among them
        assert "[0]" in other
        cable.mend()
        until(lambda: list(fabrics[1].living()) == [0, 1])
        again, late = at_once(lambda: mean(here), lambda: mean(there))
        assert again == 1
        assert "left out" in late


@pytest.mark.parametrize(
    ("before", "after"), [(True, True), (False, False), (True, False), (False, True)], ids=str
)
def test_a_member_that_starts_again_is_heard_again(before, after):
    """Through memory or by line, in each of its lives."""
    store = dist.HashStore()
    options = {"deadline_seconds": 10.0, "silence_seconds": 1.0}
    each = {1: {"shared_memory": before}}
    with members(2, {0: store, 1: store}, each, **options) as fabrics:
        here, there = channels(fabrics)
        for number in range(4):
            there.publish(fill(number))
            there.send(0, "x", fill(number))
        assert here.wait_newer([1], [0], DEADLINE_SECONDS)
        there.send(0, "last", fill(4))
        assert here.wait("last", DEADLINE_SECONDS) is not None, "what was sent before it has come too"
        assert here.wait("x", DEADLINE_SECONDS) is not None
        until(lambda: here.version(1) == 4)
        assert here.send(1, "lost", fill(7))
        fabrics[1].endpoint._close_connections()  # as if its process had ended
        until(lambda: list(fabrics[0].living()) == [0])
        lives = fabrics[0].endpoint.connections[1].times_connected
        assert not here.send(1, "x", fill(0))
        fabrics[1] = NetworkFabric(1, 2, store, run_id=RUN, secret=SECRET, **options, shared_memory=after)
        (again,) = channels(fabrics[1:])
        connection = fabrics[0].endpoint.connections[1]
        until(
            lambda: connection.times_connected > lives,
            "it lives by its new card before the line to it stands",
        )
        until(lambda: list(fabrics[0].living()) == [0, 1], "both live")
        assert (connection.local_peer is not None) == after
        assert torch.equal(here.peek(1)[0], fill(3)), "the former life's, as long as there is nothing newer"
        left = [here.wait("x", DEADLINE_SECONDS) for _ in range(3)]
        assert [float(message.x[0]) for message in left] == [1.0, 2.0, 3.0], "what it sent can still be read"
        assert again.receive("lost") is None, "what was sent to it was for the former life alone"
        again.publish(fill(50))
        assert here.wait_newer([1], [4], DEADLINE_SECONDS), (
            "versions must go on where the former life's ended"
        )
        assert torch.equal(here.peek(1)[0], fill(50))
        assert again.send(0, "y", fill(51))
        assert torch.equal(here.wait("y", DEADLINE_SECONDS).x, fill(51))
        assert here.send(1, "y", fill(52))
        assert torch.equal(again.wait("y", DEADLINE_SECONDS).x, fill(52))
        with pytest.raises(FabricError, match="left out"):
            at_once(lambda: here.mean_(fill(0)), lambda: again.mean_(fill(0)))


# -- processes that are killed --------------------------------------------------------------------

ROUNDS = 60


def mean_until_killed(victims, fabric):
    """Bits and count of each round; a victim kills itself somewhere within a round or between two."""
    channel = fabric.channel("model", torch.zeros(N))
    generator = torch.Generator().manual_seed(fabric.rank)
    results = []
    for turn in range(ROUNDS):
        if victims.get(fabric.rank) == turn:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(N, generator=generator)
        count = channel.mean_(x)
        results.append((count, x.numpy().tobytes()))
    return results, list(channel.living())


@pytest.mark.parametrize(
    ("victims", "run_state"),
    [
        pytest.param(victims, run_state, marks=() if by_default else pytest.mark.slow)
        for victims, run_state, by_default in [
            ({0: 20}, True, True),
            ({0: 20}, False, False),
            ({2: 20}, True, False),
            ({2: 20}, False, True),
            ({0: 20, 1: 21}, True, True),
            ({0: 20, 1: 21}, False, False),
        ]
    ],
)
def test_the_survivors_of_a_kill_agree_bit_for_bit(victims, run_state):
    size = 4
    options = {} if run_state else {"run_state": None}
    results = run_members(size, [functools.partial(mean_until_killed, victims)] * size, **options)
    survivors = [rank for rank in range(size) if rank not in victims]
    for rank in victims:
        assert results[rank] == Died(rank, -signal.SIGKILL)
    first, living = results[survivors[0]]
    assert living == survivors
    for rank in survivors[1:]:
        assert results[rank] == (first, living)
    counts = [count for count, _ in first]
    assert counts[0] == size
    assert counts[-1] == len(survivors)
    assert counts == sorted(counts, reverse=True)
    assert counts[18] == size, "its result had reached all"
    if 0 not in victims:  # rank 0 had the result of round 19 to tell, and may have died over it
        assert counts[19] == size, "all had brought their part"
    assert counts[21] <= size - 1
