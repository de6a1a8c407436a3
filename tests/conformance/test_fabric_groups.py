"""What every fabric must do for a channel among some of its members: all that a channel of everybody does.

Rank r of the fabric has vector(r); expectations go by the positions in a group.
"""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch

from conformance.fabric_roles import N, found, vector
from murmurate.fabric import fabrics
from murmurate.fabric.interface import Capability, ranks_across, ranks_within
from murmurate.fabric.network.fabric import run_members as over_links
from murmurate.fabric.processes.fabric import Died
from murmurate.fabric.processes.fabric import run_members as in_processes
from murmurate.fabric.simulated.fabric import Crashed, SimulatedFabric

SIZE = 4
PAIRS = ((0, 1), (2, 3))
CROSSED = ((0, 2), (1, 3))
OVERLAPPING = ((0, 1, 2), (1, 2, 3))
ALONE = ((0,), (1,), (2,), (3,))
GROUPS = (*PAIRS, *OVERLAPPING, *ALONE, (0, 1, 2, 3), *CROSSED)
CALLS = 6


@pytest.fixture(params=found())
def members(request):
    fabric = fabrics()[request.param]
    return lambda function, size=SIZE: fabric.run_members(size, [function] * size)


def use_all(channel, group):
    """All verbs of one channel, from one member's side; expectations by name."""
    last = channel.size - 1
    x = vector(group[channel.rank])
    count = channel.mean_(x)
    gathered = {rank: theirs.clone() for rank, theirs in channel.gather(vector(group[channel.rank])).items()}
    y = vector(group[channel.rank])
    channel.broadcast_(y, last)
    after = (channel.rank + 1) % channel.size
    assert channel.send(after, "next", vector(group[channel.rank]), note=float(channel.rank))
    message = channel.wait("next", 30.0)
    channel.publish(vector(group[channel.rank], salt=1))
    assert channel.wait_newer(range(channel.size), [0] * channel.size, 30.0)
    read = [channel.peek(peer)[0].clone() for peer in range(channel.size)]
    shared = None
    if Capability.SHARED_MEMORY in channel.capabilities:
        memory = channel.shared("params", vector(group[channel.rank]))
        channel.gather(torch.zeros(N))
        memory[channel.rank] = 100.0 + channel.rank
        channel.gather(torch.zeros(N))
        shared = memory.clone()
    return {
        "who": (channel.rank, channel.size, list(channel.living()), channel.has_lost(last)),
        "mean": (count, x),
        "gathered": gathered,
        "broadcast": y,
        "message": (message.sender, message.note, message.x),
        "read": read,
        "shared": shared,
    }


def in_groups(fabric):
    outcome = {}
    for group in GROUPS:
        if fabric.rank in group:
            outcome[group] = use_all(fabric.channel("model", torch.zeros(N), members=group), group)
    return outcome


def check(group, rank, outcome):
    size, place = len(group), group.index(rank)
    assert outcome["who"] == (place, size, list(range(size)), False)
    count, mean = outcome["mean"]
    assert count == size
    exact = torch.stack([vector(r) for r in group]).double().mean(0)
    torch.testing.assert_close(mean.double(), exact, rtol=0, atol=4e-7)
    assert sorted(outcome["gathered"]) == list(range(size))
    assert all(torch.equal(x, vector(group[p])) for p, x in outcome["gathered"].items())
    assert torch.equal(outcome["broadcast"], vector(group[-1]))
    before = (place - 1) % size
    sender, note, x = outcome["message"]
    assert (sender, note) == (before, float(before))
    assert torch.equal(x, vector(group[before]))
    assert all(torch.equal(x, vector(group[p], salt=1)) for p, x in enumerate(outcome["read"]))
    if outcome["shared"] is not None:
        expected = vector(group[0])
        expected[:size] = 100.0 + torch.arange(size)
        assert torch.equal(outcome["shared"], expected)


def test_a_group_has_all_that_everybody_has_and_groups_do_not_mix(members):
    results = members(in_groups)
    for rank, outcomes in enumerate(results):
        assert set(outcomes) == {group for group in GROUPS if rank in group}
        for group, outcome in outcomes.items():
            check(group, rank, outcome)
    for group in GROUPS:  # to the bit
        first, *others = (results[rank][group]["mean"][1] for rank in group)
        assert all(torch.equal(first, other) for other in others)


def in_another_order(fabric):
    """Channels of everybody and of groups, made and used as each likes, as far as they are its own affair."""
    pair = PAIRS[0] if fabric.rank in PAIRS[0] else PAIRS[1]
    if fabric.rank % 2:
        early = fabric.channel("model", torch.zeros(N), members=pair)
    everybody = fabric.channel("model", torch.zeros(N))
    if not fabric.rank % 2:
        early = fabric.channel("model", torch.zeros(N), members=pair)
    other = fabric.channel("other", torch.zeros(3))
    x, y, z = vector(fabric.rank), vector(fabric.rank), torch.full((3,), float(fabric.rank))
    if fabric.rank in PAIRS[1]:
        early.mean_(y)
        early.mean_(y)
    everybody.mean_(x)
    other.mean_(z)
    if fabric.rank in PAIRS[0]:
        early.mean_(y)
    return x, y, z


def test_a_group_goes_at_its_own_pace(members):
    results = members(in_another_order)
    means = [torch.stack([vector(r) for r in pair]).double().mean(0) for pair in PAIRS]
    for rank, (x, y, z) in enumerate(results):
        exact = torch.stack([vector(r) for r in range(SIZE)]).double().mean(0)
        torch.testing.assert_close(x.double(), exact, rtol=0, atol=4e-7)
        torch.testing.assert_close(y.double(), means[rank // 2], rtol=0, atol=4e-7)
        assert torch.equal(z, torch.full((3,), 1.5))


def refused(fabric):
    words = []
    for group in ((0, 1), (1, 0), (2, 2), (2, SIZE)):
        try:
            fabric.channel("model", torch.zeros(N), members=group)
            words.append("")
        except ValueError as error:
            words.append(str(error))
    return words


def test_no_group_without_oneself_or_of_ranks_that_there_are_not(members):
    not_in, *no_group = members(refused)[2]
    assert "Rank 2 is not in the group [0, 1]" in not_in
    assert all("is no group" in words for words in no_group)


def test_a_rank_is_a_replica_and_a_part_of_it():
    """rank = replica * parts + part."""
    parts, size = 3, 12
    for rank in range(size):
        replica, part = divmod(rank, parts)
        assert list(ranks_within(rank, parts)) == [replica * parts + p for p in range(parts)]
        assert list(ranks_across(rank, parts, size)) == [r * parts + part for r in range(size // parts)]


# -- a death in one group -------------------------------------------------------------------------


def go_on_without(dies, fabric):
    """Rank 3 dies between two means of its group. Counts of the group and of everybody, who lives in each."""
    pair = PAIRS[0] if fabric.rank in PAIRS[0] else PAIRS[1]
    group = fabric.channel("model", torch.zeros(N), members=pair)
    everybody = fabric.channel("model", torch.zeros(N))
    counts = []
    for call in range(CALLS):
        if call == CALLS // 2 and fabric.rank == 3:
            dies(fabric)
        counts.append(group.mean_(vector(fabric.rank, salt=call)))
    return counts, everybody.mean_(vector(fabric.rank)), list(group.living()), list(everybody.living())


def kill(_):
    os.kill(os.getpid(), signal.SIGKILL)


def survived(*results):
    untouched = [2] * CALLS, 3, [0, 1], [0, 1, 2]
    alone = [2] * (CALLS // 2) + [1] * (CALLS - CALLS // 2), 3, [0], [0, 1, 2]
    assert results == (untouched, untouched, alone)


@pytest.mark.parametrize("run_members", [in_processes, over_links], ids=["processes", "network"])
def test_a_death_in_one_group_does_not_disturb_another(run_members):
    *living, dead = run_members(SIZE, [functools.partial(go_on_without, kill)] * SIZE)
    assert dead == Died(3, -signal.SIGKILL)
    survived(*living)


@pytest.mark.parametrize("seed", range(5))
def test_a_simulated_death_in_one_group_does_not_disturb_another(seed):
    fabric = SimulatedFabric(SIZE, seed=seed, latency=(0.0, 0.3))

    def dies(member):
        fabric.crash(member.rank)
        member.living()

    *living, dead = fabric.run([functools.partial(go_on_without, dies)] * SIZE)
    assert isinstance(dead, Crashed)
    survived(*living)


def test_a_revived_member_finds_its_group_where_it_is():
    fabric = SimulatedFabric(3, seed=0)
    group = (1, 2)

    def mean(member, value):
        x = torch.full((N,), float(value))
        return member.channel("model", torch.zeros(N), members=group).mean_(x), float(x[0])

    def first(member):
        before = mean(member, 1) if member.rank in group else None
        member.compute(1.0)
        return before, mean(member, 3) if member.rank in group else None

    def dies(member):
        mean(member, 2)
        fabric.crash(2)
        member.living()

    def again(member):
        member.join()
        return mean(member, 5)

    fabric.at(0.5, lambda: fabric.revive(2, again, like=1))
    nobody, kept, back = fabric.run([first, first, dies])
    assert nobody == (None, None)
    assert kept == ((2, 1.5), (2, 4.0))
    assert back == (2, 4.0)
