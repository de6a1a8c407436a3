"""DPSGD under many schedules with faults, over checkpoints and on real processes: nothing lost or twice."""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch

from laws.centre import (
    ETA,
    START,
    Exact,
    check_death_is_told,
    check_exchanges,
    finish,
    gradient_of,
    is_centre,
    keep,
    plain,
    troubled,
)
from laws.dpsgd import KINDS, NAMES, PLAIN
from laws.problems import Point
from murmurate.fabric.processes.fabric import Died, run_members
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.dpsgd import DPSGD

# -- many schedules ---------------------------------------------------------------------------------------


def nodes_of(strategy, learners):
    p = strategy.threads
    return [list(range(learners))[k : k + p] for k in range(0, learners, p)]


def pending(states):
    """What nodes have learned and not pushed, from the state of one member of each."""
    return sum(state["params"] - state["base"] for state in states)


def unfolded(centre_state):
    return sum(centre_state["unfolded"].values(), torch.zeros(3, dtype=torch.float64))


def learned(clocks, ranks):
    return -ETA * sum(float(clocks[r]) * gradient_of(r) for r in ranks)


class TestUnderFaults:
    @pytest.mark.parametrize("strategy", KINDS, ids=NAMES)
    def test_v_is_the_sum_of_what_was_folded_and_no_member_hangs(self, strategy):
        """40 schedules a kind with delays and faults, in half of which a learner dies, leaders too."""
        learners, start = 4, torch.tensor(START, dtype=torch.float64)
        died, led_on, refusals = 0, 0, 0
        for seed in range(40):
            found = Exact(strategy).run(seed, learners, **troubled(seed, learners, crash=seed % 2 == 1))
            centre = found[-1]
            assert centre.drained
            taken = {r: torch.zeros(3, dtype=torch.float64) for r in range(learners)}
            notes = {r: [n for to, _, _, n, _ in centre.watched.sent if to == r] for r in taken}
            for sender, _, x, note in centre.watched.received:
                if note >= 0 and notes[sender].pop(0) >= 0:
                    taken[sender] += x
            refusals += centre.strategy["refused"]
            assert torch.equal(centre.params + unfolded(centre.strategy), start + sum(taken.values())), seed
            for node in nodes_of(strategy, learners):
                alive = [r for r in node if not isinstance(found[r], BaseException)]
                died += len(node) - len(alive)
                for r in alive:
                    check_exchanges(found[r].exchanges, learners + 1)
                    assert bool(torch.isfinite(found[r].params).all())
                if not alive:
                    continue
                led_on += alive[0] != node[0] and bool(taken[alive[0]].any())
                state = found[alive[0]].strategy
                pushed = sum(taken[r] for r in node)
                if not strategy.delay_bound:
                    assert torch.equal(pushed + pending([state]), learned(state["clocks"], node)), seed
        assert died >= 13
        assert bool(refusals) == bool(strategy.delay_bound)
        assert bool(led_on) == (strategy.threads > 1)

    def test_the_masters_death_is_an_error_for_every_thread(self):
        for strategy, schedules in (
            (PLAIN, 12),
            (DPSGD(global_learning_rate=1.0, threads=2, local_updates=3), 12),
            # it dies before the first push, so that schedules hardly differ
            (DPSGD(global_learning_rate=1.0, threads=0, local_updates=500), 4),
        ):
            check_death_is_told(strategy, 3, range(schedules))

    def test_fewer_nodes_than_m_delay_no_member(self):
        strategy = DPSGD(global_learning_rate=1.0, threads=1, local_updates=1, batch=5, wait=True)
        one, two, centre = Exact(strategy, steps=10).run(0, 2)
        assert one.exchanges[-1].round == 10
        assert two.exchanges[-1].round == 11
        assert centre.state["clock"] == 4


class TestCheckpoint:
    @pytest.mark.parametrize("strategy", KINDS[:3], ids=NAMES[:3])
    def test_each_update_is_once_in_what_is_saved(self, strategy):
        """v, what waits to be folded, and what nodes have yet to push: 40 schedules a kind."""
        start = torch.tensor(START, dtype=torch.float64)
        for seed in range(40):
            saves = (1 + seed % 7, 3, 1 + (5 * seed) % 9, 1 + seed % 4)
            case = Exact(strategy, saves=saves, turns=(seed * 3) % 17)
            found = case.run(seed, 4, **troubled(seed, 4))
            parts = [one.cut for one in found[:-1]] + [found[-1].cuts[1]]
            centre = parts[-1]["x"]
            nodes = nodes_of(strategy, 4)
            leaders = [parts[node[0]]["x"]["strategy"] for node in nodes]
            held = centre["replica"]["params"]["x"] + unfolded(centre["strategy"]) + pending(leaders)
            made = sum(learned(s["clocks"], node) for s, node in zip(leaders, nodes, strict=True))
            assert torch.equal(held, start + made), seed
            if seed % 5 == 0:
                again = Exact(strategy, steps=5, restored=tuple(parts)).run(seed + 1, 4, **troubled(seed, 4))
                states = [again[node[0]].strategy for node in nodes]
                held = again[-1].params + unfolded(again[-1].strategy) + pending(states)
                after = learned([5 + r for r in range(4)], range(4))
                assert torch.equal(held, start + made + after), seed

    def test_a_learner_that_does_not_come_skips_it_and_the_run_goes_on(self):
        strategy, start = (
            DPSGD(global_learning_rate=1.0, threads=1, local_updates=1, wait=True),
            torch.tensor(START).double(),
        )
        for seed in range(20):
            case = Exact(strategy, saves=(2, 0, 4), turns=4, patience_seconds=2e-3)
            found = case.run(seed, 3, **troubled(seed, 3))
            assert found[-1].cuts == {}
            made = learned([one.steps for one in found[:-1]], range(3))
            left = pending([one.strategy for one in found[:-1]])
            assert torch.equal(found[-1].params + left, start + made)

    def test_a_node_that_must_take_anothers_part_begins_at_v_and_pushes_nothing_of_it(self):
        found = Exact(PLAIN, saves=(2, 3), turns=0).run(0, 2)
        mine, theirs, centre = found[0].cut, found[1].cut, found[-1].cuts[1]
        start = torch.tensor(START, dtype=torch.float64)
        v = centre["x"]["replica"]["params"]["x"]
        again = Exact(PLAIN, steps=1, restored=(mine, mine, centre)).run(0, 2)
        left = pending([one.strategy for one in again[:-1]])
        first = mine["x"]["strategy"]
        expected = v + (first["params"] - first["base"]) + learned([1, 2], range(2))
        assert torch.equal(again[-1].params + left, expected)
        assert theirs["x"]["strategy"]["rank"] == 1
        assert not torch.equal(v, start)


# -- real processes ---------------------------------------------------------------------------------------


def race(deadly, own_fabric):
    """60 updates each, on two nodes of two; if ``deadly`` rank 0, which leads, is killed after 20."""
    replicator = Replicator(DPSGD(global_learning_rate=1.0, threads=2, local_updates=3), own_fabric)
    replica = replicator.replicate("x", Point(*START), plain)
    bound = replicator.bound_replicas["x"]
    if is_centre(own_fabric):
        served = keep(replicator, own_fabric)
        return served.params, [(s, x, n) for s, _, x, n in served.watched.received], served.drained
    exchanges = []
    for step in range(60):
        exchanges.append(replica.follow(gradient_of(own_fabric.rank)))
        if deadly and step == 20:
            if own_fabric.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            while 0 in own_fabric.living():
                bound.channel.wait("nothing", 0.001)
    finish(replicator, own_fabric)
    return exchanges, bound.strategy.consensus(replica, bound.channel), bound.strategy.state()


@pytest.mark.parametrize("deadly", [False, True])
def test_threads_of_a_node_on_real_processes(deadly):
    """Racing for real: updates may be lost to one another, what was pushed may not."""
    *learners, (v, messages, drained) = run_members(5, [functools.partial(race, deadly)] * 5)
    assert drained
    pushes = [(sender, x) for sender, x, note in messages if note >= 0]
    torch.testing.assert_close(
        v, torch.tensor(START, dtype=torch.float64) + sum(x for _, x in pushes), rtol=0, atol=1e-9
    )
    senders = {sender for sender, _ in pushes}
    if deadly:
        assert learners.pop(0) == Died(0, -signal.SIGKILL)
        assert 1 in senders  # it leads now
        assert senders <= {0, 1, 2}
    else:
        assert senders == {0, 2}
    for exchanges, consensus, state in learners:
        check_exchanges(exchanges, 5)
        assert torch.equal(consensus, v)
        assert state["clocks"].tolist()[1:4] == [60, 60, 60]
