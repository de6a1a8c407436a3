"""DPSGD by hand: what nodes push, what the master makes of it, who leads; and Corollary 1 as a table."""

from __future__ import annotations

import re

import pytest
import torch

from laws.problems import same
from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability, FabricError
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.dpsgd.step_sizes import refuse_shrinking, scaled_rate
from strategies.manual_fabric import Company

ALONE = {"threads": 1, "wait": True}


@pytest.mark.parametrize(
    ("p", "B", "M", "expected"),
    [
        (1, 1, 1, 0.1),
        (2, 8, 1, 0.05),  # eq. 13: 0.1 / 16^(1/4)
        (1, 16, 1, 0.05),
        (1, 1, 16, 0.05),
        (6, 5, 16, 0.1 / 480**0.25),
    ],
)
def test_corollary_1_as_a_table(p, B, M, expected):
    assert scaled_rate(0.1, p, B, M) == pytest.approx(expected, rel=1e-12)


def test_corollary_1_scales_eta_and_rho_by_threads_of_a_node_and_not_by_nodes():
    """p = 2, B = 4, M = 2: both rates by 1/2, so v moves by a quarter; the number of nodes is not in it."""
    for learners in (4, 8):
        strategy = DPSGD(threads=2, local_updates=4, batch=2, scale_rates=True, global_learning_rate=3.0)
        company = Company(strategy, learners)
        assert company.bound_replicas[0].replica.optimizer.param_groups[0]["lr"] == 0.5
        assert company.centre.strategy._master.optimizer.param_groups[0]["lr"] == 1.5
    plain = Company(DPSGD(global_learning_rate=1.0, threads=2, local_updates=4, batch=2), 4)
    assert plain.bound_replicas[0].replica.optimizer.param_groups[0]["lr"] == 1.0


def test_an_advised_rate_is_not_refused():
    for eta in (0.01, 0.03, 0.1, 0.3):
        for p, B, M in ((2, 20, 8), (1, 3, 5), (4, 10, 32), (1, 1, 90)):
            with pytest.raises(Refusal, match="global_learning_rate of") as caught:
                refuse_shrinking(eta, 50.0, p, B, M)
            advised = float(re.search(r"learning_rate of ([\d.e-]+) or less", str(caught.value))[1])
            assert advised > 0
            refuse_shrinking(eta, advised, p, B, M)


def test_corollary_1_takes_the_threads_that_there_are():
    company = Company(DPSGD(global_learning_rate=1.0, threads=8, local_updates=8, scale_rates=True), 2)
    assert company.bound_replicas[0].replica.optimizer.param_groups[0]["lr"] == pytest.approx(16**-0.25)


def test_corollary_1_scales_the_start_of_a_schedule():
    company = Company(
        DPSGD(global_learning_rate=1.0, threads=1, local_updates=16, scale_rates=True),
        1,
        schedule=lambda k: 1.0 if k == 0 else 0.5,
    )
    assert company.step(0, 1.0)[0] == -0.5
    assert company.step(0, 1.0)[0] == -0.75


def test_two_nodes_of_one_thread_by_hand():
    """B = 2, rho = 1/2: a push every second update; v moves by half of it; u begins again at v."""
    company = Company(DPSGD(local_updates=2, global_learning_rate=0.5, **ALONE), 2, start=10.0)
    assert company.step(0, 1.0) == (9.0, 0, 1, 1)
    assert company.step(0, 3.0) == (8.0, 1, 2, 0)  # pushed -4: v = 8
    assert company.step(1, 2.0) == (8.0, 0, 1, 1)
    assert company.step(1, 0.0) == (7.0, 1, 2, 0)  # pushed -2 of v = 10: v = 7
    assert company.step(0, 1.0) == (7.0, 1, 1, 1)
    assert company.step(0, 1.0) == (6.0, 2, 2, 0)
    pushes = [(who, x, note) for who, _, tag, x, note in company.fabric.sent if tag == "update"]
    assert pushes == [(0, [-4.0], 0.0), (1, [-2.0], 0.0), (0, [-2.0], 1.0)]


def test_the_master_has_momentum():
    company = Company(
        DPSGD(global_learning_rate=1.0, local_updates=1, global_momentum=0.5, **ALONE), 1, start=0.0
    )
    assert [company.step(0, g)[0] for g in (1.0, 0.0, 2.0)] == [-1.0, -1.5, -3.75]


def test_the_master_joins_m_and_answers_at_once_with_what_it_has():
    """M = 2 of one node: nobody waits for a fold, be M more than the nodes or one of them dead."""
    company = Company(DPSGD(global_learning_rate=1.0, local_updates=1, batch=2, **ALONE), 1, start=0.0)
    assert company.step(0, 1.0) == (0.0, 1, 2, 0)  # not folded yet: v is still 0
    assert company.centre.strategy.state()["unfolded"]["0"].tolist() == [-1.0]
    assert company.step(0, 2.0) == (-3.0, 2, 2, 0)
    assert company.centre.replica.clock == 1
    assert company.centre.strategy.state()["unfolded"] == {}


def test_a_node_of_two_threads_by_hand():
    """One vector u; 2 B updates between pushes, whoever makes them; only the leader speaks."""
    company = Company(DPSGD(global_learning_rate=1.0, threads=2, local_updates=2), 2, start=0.0, served=False)
    assert company.step(0, 1.0) == (-1.0, 0, 2, 1)
    assert company.step(1, 1.0) == (-2.0, 0, 2, 1)
    assert company.step(1, 1.0) == (-3.0, 0, 2, 2)
    assert company.step(1, 1.0) == (-4.0, 0, 2, 3)  # the fourth, but it does not lead
    assert company.fabric.sent == []
    assert company.step(0, 1.0) == (-5.0, 0, 2, 2)  # pushes -5
    assert company.step(1, 2.0) == (-7.0, 0, 2, 4)
    assert company.serve() == 1
    assert company.value() == -5.0
    with torch.no_grad():
        company.centre.replica.params.sub_(100.0)  # as if others had pushed
    company.serve()
    company.fabric.mail[0, "parameters"][0].x.sub_(100.0)
    assert company.step(0, 4.0) == (-111.0, 1, 3, 0)  # v' + (u - u at the push): -105 - 2 - 4
    assert company.step(1, 0.0) == (-111.0, 1, 3, 0)  # the other thread sees the round too
    assert company.value(0) == company.value(1)


def test_a_late_answer_keeps_what_was_learned_meanwhile_though_asked_to_wait():
    company = Company(
        DPSGD(global_learning_rate=1.0, local_updates=1, deadline_seconds=0.1, **ALONE),
        1,
        start=0.0,
        served=False,
    )
    assert company.step(0, 1.0) == (-1.0, 0, 1, 1)
    company.serve()
    assert company.step(0, 2.0) == (-3.0, 1, 2, 0)
    assert company.fabric.sent[-1][2:4] == ("update", [-2.0])
    company.serve()
    assert company.value() == -3.0


class TestLeading:
    def test_when_the_leader_dies_the_next_pushes_and_nothing_twice(self):
        company = Company(
            DPSGD(global_learning_rate=1.0, threads=2, local_updates=1), 2, start=0.0, served=False
        )
        company.step(0, 1.0)
        company.step(1, 1.0)
        company.step(0, 1.0)  # pushes -3; the answer will go to it
        company.fabric.dead.add(0)
        assert company.step(1, 4.0) == (-7.0, 0, 1, 2)  # leads: that answer is lost, and one update is due
        company.serve()
        assert company.value() == -7.0
        assert company.step(1, 0.0) == (-7.0, 1, 2, 0)
        pushes = [(who, x) for who, _, tag, x, _ in company.fabric.sent if tag == "update"]
        assert pushes == [(0, [-3.0]), (1, [-4.0]), (1, [0.0])]

    def test_a_member_that_does_not_lead_never_sends(self):
        company = Company(DPSGD(global_learning_rate=1.0, threads=0, local_updates=1), 3, served=False)
        for rank in (1, 2, 1, 2):
            company.step(rank, 1.0)
        assert company.fabric.sent == []


class TestDelayBound:
    def three(self, bound, **how):
        company = Company(
            DPSGD(global_learning_rate=1.0, local_updates=1, delay_bound=bound, **how), 2, start=0.0
        )
        for _ in range(3):
            company.step(0, 1.0)
        return company

    def test_as_old_as_the_bound_is_folded(self):
        company = self.three(3, **ALONE)
        assert company.step(1, 10.0)[0] == -13.0
        assert company.centre.strategy.refused == 0

    def test_older_is_refused_and_counted_and_the_node_goes_on_from_the_fresh_v(self):
        company = self.three(2, **ALONE)
        assert company.step(1, 10.0) == (-3.0, 1, 2, 0)
        assert company.value() == -3.0
        assert company.centre.strategy.refused == company.bound_replicas[1].strategy.refused == 1
        assert company.step(1, 10.0)[0] == company.value() == -13.0

    def test_what_was_learned_behind_a_refused_push_is_dropped_with_it(self):
        company = self.three(2, threads=1, wait=True)
        late = company.bound_replicas[1]
        late.strategy.wait = False
        company.step(1, 10.0)
        company.step(1, 20.0)
        company.serve()
        company.step(1, 40.0)
        assert late.strategy.refused == 1
        assert company.value(1) == company.value() == -3.0

    def test_a_push_is_as_old_as_its_oldest_update(self):
        company = Company(
            DPSGD(global_learning_rate=1.0, threads=1, local_updates=1, wait=False),
            1,
            start=0.0,
            served=False,
        )
        company.step(0, 1.0)
        company.step(0, 1.0)  # of version 0, after the push
        company.serve()
        company.step(0, 1.0)  # pulls version 1, and pushes both
        assert company.fabric.sent[-1][2:] == ("update", [-2.0], 0.0)


def test_the_death_of_the_master_is_an_error_for_every_thread():
    company = Company(DPSGD(global_learning_rate=1.0, threads=2), 2)
    company.fabric.dead.add(2)
    for rank in (0, 1):
        with pytest.raises(
            FabricError, match="rank 2, which kept the centre, is dead or out of reach, and with it v"
        ):
            company.step(rank, 1.0)


def test_the_schedule_counts_the_updates_of_all_as_far_as_the_node_can_tell():
    company = Company(
        DPSGD(global_learning_rate=1.0, threads=2, local_updates=9), 4, schedule=lambda k: 2.0**-k
    )
    assert company.step(0, 1.0)[0] == -1.0
    assert company.step(1, 1.0)[0] == -1.25  # one here stands for two of four
    assert company.step(0, 1.0)[0] == -1.3125


def test_vectors_restored_unfolded_are_joined_in_their_order():
    company = Company(DPSGD(global_learning_rate=1.0, local_updates=1, batch=20, **ALONE), 1)
    for k in range(12):
        company.step(0, float(k))
    state = company.centre.strategy.state()
    company.centre.strategy.load(state)
    assert [one.item() for one in company.centre.strategy._master.pending] == [-float(k) for k in range(12)]


def test_a_resumed_company_has_all_that_was_saved_and_goes_on():
    """M = 2 with momentum: v = -10, a push of -2 waits for another; node 1 was refused, and learned -4."""
    strategy = DPSGD(
        global_learning_rate=1.0, local_updates=2, batch=2, global_momentum=0.5, delay_bound=1, **ALONE
    )
    company, again = Company(strategy, 2), Company(strategy, 2)
    for rank, gradient in [(0, 1.0)] * 8 + [(1, 1.0)] * 2 + [(0, 1.0)] * 2 + [(1, 4.0)]:
        company.step(rank, gradient)
    saved = [(bound.replica.state(), bound.strategy.state()) for bound in company.bound_replicas]
    for bound, (replica, state) in zip(again.bound_replicas, saved, strict=True):
        bound.replica.load(replica)
        bound.strategy.load(state)
    for bound in again.bound_replicas:
        bound.strategy.resumed(bound.replica, bound.channel)
    assert saved[1][1]["marks"].tolist() == [2, 0, 2, 2, 1]
    assert [state["refused"] for _, state in saved] == [0, 1, 1]
    for rank, (_, state) in enumerate(saved):
        if "marks" in state:
            state["marks"][1] = rank + 1  # the master sends v to each
        assert same(again.bound_replicas[rank].strategy.state(), state)
    assert again.step(1, 0.0) == (-19.0, 2, 2, 0)  # momentum: 6 / 2 + 2 + 4


def test_threads_of_a_node_that_is_resumed_keep_their_counts():
    strategy = DPSGD(threads=2, local_updates=8, counted="node", global_learning_rate=1.0)
    company, again = Company(strategy, 2, start=0.0), Company(strategy, 2, start=0.0)
    for rank in (0, 0, 0, 1, 1):
        company.step(rank, 1.0)
    for bound, saved in zip(again.bound_replicas, company.bound_replicas, strict=True):
        bound.replica.load(saved.replica.state())
        bound.strategy.load(saved.strategy.state())
    for bound in again.bound_replicas[:2]:
        bound.strategy.resumed(bound.replica, bound.channel)
        assert bound.strategy.state()["clocks"].tolist() == [3, 2, 0]


def test_b_counts_the_updates_of_the_node_as_in_algorithm_9():
    """B = 3 of a node of two: a push after three updates, whoever makes them, when the leader comes by."""
    counted = {"counted": "node", "threads": 2, "local_updates": 3, "global_learning_rate": 1.0}
    company = Company(DPSGD(**counted), 2, start=0.0, served=False)
    company.step(0, 1.0)
    company.step(1, 1.0)
    assert company.fabric.sent == []
    company.step(0, 1.0)
    assert company.serve() == 1
    assert company.value() == -3.0
    late = Company(DPSGD(**counted), 2, start=0.0, served=False)
    for _ in range(4):
        late.step(1, 1.0)  # does not lead
    late.step(0, 1.0)
    late.serve()
    assert late.value() == -5.0


def test_m_may_be_the_number_of_nodes():
    """M = 0 of two nodes: v moves once both have pushed, by rho times the sum, with momentum."""
    company = Company(
        DPSGD(batch=0, local_updates=1, global_learning_rate=0.01, global_momentum=0.5, **ALONE), 2
    )
    company.step(0, 1.0)
    company.step(0, 1.0)
    assert company.centre.replica.clock == 1  # two pushes, of one node
    assert company.value() == pytest.approx(-0.02)
    company.step(0, 1.0)
    assert company.value() == pytest.approx(-0.02)
    company.step(1, 3.0)
    assert company.value() == pytest.approx(-0.02 - 0.5 * 0.02 - 0.01 * 4)
    scaled = DPSGD(batch=0, threads=2, local_updates=4, counted="node", scale_rates=True)
    replicas = Company(scaled, 8).bound_replicas  # 4 nodes: (B M)^(1/4) = 2
    assert replicas[0].replica.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("threads", -1),
        ("local_updates", 0),
        ("batch", -1),
        ("delay_bound", -1),
        ("global_learning_rate", 0.0),
    ],
)
def test_what_makes_no_sense_is_an_error(what, value):
    with pytest.raises(ValueError, match=what):
        DPSGD(**{what: value})


def test_nodes_of_one_share_nothing_and_larger_ones_do():
    assert Capability.SHARED_MEMORY not in DPSGD(threads=1).needs
    assert Capability.SHARED_MEMORY in DPSGD(threads=2).needs & DPSGD(threads=0).needs & DPSGD().needs


def test_a_node_of_one_that_is_started_again_pushes_nothing_of_its_peer():
    company = Company(DPSGD(global_learning_rate=1.0, local_updates=2, **ALONE), 2, start=0.0)
    for _ in range(3):
        company.step(0, 1.0)  # pushed -2, and is one update further
    donor, joiner = company.bound_replicas[0], company.bound_replicas[1]
    company.step(1, 50.0)  # of a life that ends here
    joiner.replica.load(donor.replica.state())
    joiner.strategy.load(donor.strategy.state())
    joiner.strategy.joined(joiner.replica, joiner.channel)
    joiner.replica.reload()
    assert company.value(1) == company.value(0) == -3.0
    company.step(1, 10.0)
    company.step(1, 10.0)
    pushes = [(who, x) for who, _, tag, x, _ in company.fabric.sent if tag == "update"]
    assert pushes == [(0, [-2.0]), (1, [-20.0])]


def test_the_schedule_of_a_node_of_one_that_is_started_again_goes_on_from_its_peers():
    company = Company(DPSGD(**ALONE), 2, schedule=lambda k: max(0.0, 1 - k / 100))
    for _ in range(30):
        company.step(0, 1.0)
    donor, joiner = company.bound_replicas[0], company.bound_replicas[1]
    joiner.replica.load(donor.replica.state())
    joiner.strategy.load(donor.strategy.state())
    joiner.strategy.joined(joiner.replica, joiner.channel)
    assert joiner.replica.steps_taken() == donor.replica.steps_taken() == 60
    company.step(1, 1.0)
    assert joiner.strategy._node.counters.tolist()[:2] == [30, 0], "its first push is B updates away"
