"""The parameter server by hand: Downpour's history, what is refused, who is told of what."""

from __future__ import annotations

import pytest
import torch

from murmurate.fabric.interface import FabricError, Message
from murmurate.strategies.parameter_server import ParameterServer
from strategies.manual_fabric import Company


def test_downpour_by_hand():
    """Jin 2018, Algorithm 3 with tau = 3, alpha = 1: local steps, the sum of three gradients, the pull."""
    company = Company(ParameterServer(period=3), 2, start=10.0)
    assert company.step(0, 1.0) == (9.0, 0, 1, 1)
    assert company.step(0, 2.0) == (7.0, 0, 1, 2)
    assert company.step(1, 4.0) == (6.0, 0, 1, 1)
    assert company.step(0, 0.5) == (6.5, 1, 2, 0)  # centre: 10 - (1 + 2 + 0.5)
    assert company.step(1, 4.0) == (2.0, 0, 1, 2)
    assert company.step(1, -1.0) == (-0.5, 1, 2, 0)  # centre: 6.5 - 7; the local steps are overwritten
    assert company.value() == -0.5
    assert company.step(0, 1.0) == (5.5, 1, 1, 1)  # from what it pulled, not from where the centre is
    pushes = [(who, x, note) for who, _, tag, x, note in company.fabric.sent if tag == "gradient"]
    assert pushes == [(0, [3.5], 0.0), (1, [7.0], 0.0)]


def test_the_server_has_the_momentum():
    """Delta_t = -alpha g + mu Delta_{t-1}; a client's own steps have none."""
    company = Company(
        ParameterServer(period=2), 1, start=0.0, optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5)
    )
    values = [company.step(0, g)[0] for g in (1.0, 3.0, 2.0, 2.0, 0.0, 0.0)]
    # Delta: -0.5 * 4 = -2; -0.5 * 4 + 0.5 * -2 = -3; 0 + 0.5 * -3 = -1.5
    assert values == [-0.5, -2.0, -3.0, -5.0, -5.0, -6.5]


def test_without_local_steps_parameters_rest_between_pulls():
    company = Company(ParameterServer(period=3, local_steps=False), 1, start=1.0)
    assert [company.step(0, g)[0] for g in (1.0, 2.0, 4.0, 8.0)] == [1.0, 1.0, -6.0, -6.0]
    assert company.bound_replicas[0].replica.clock == 4


def test_the_clip_acts_on_the_sum_and_not_on_local_steps():
    company = Company(ParameterServer(period=2), 1, start=0.0, clip=1.0)
    assert company.step(0, 3.0)[0] == -3.0
    assert company.step(0, 4.0)[0] == pytest.approx(-1.0, abs=1e-6)


def test_the_schedule_counts_all_updates_at_the_centre_and_at_the_clients():
    """Rate 2^-k at k updates of all: the second client's first push is already at k = 2, then 4."""
    company = Company(ParameterServer(period=2), 2, start=0.0, schedule=lambda k: 2.0**-k)
    assert company.step(0, 1.0)[0] == -1.0  # own step at k = 0
    assert company.step(0, 1.0)[0] == -2.0  # the fold, at k = 0
    assert company.step(0, 1.0)[0] == -2.25  # own step at k = 2
    client = company.bound_replicas[0].replica
    assert client.optimizer.param_groups[0]["lr"] == 0.25  # which agents record
    assert company.step(1, 1.0)[0] == -1.0  # it knows of no fold yet
    assert company.step(1, 1.0)[0] == -2.5  # the fold, at k = 2
    assert company.step(0, 1.0)[0] == -2.625  # the fold, at k = 4


def test_the_schedule_counts_the_clients_own_updates_since_its_last_pull():
    company = Company(ParameterServer(period=3), 1, start=0.0, schedule=lambda k: 2.0**-k)
    # own steps at k = 0 and 1, the fold at k = 0; own steps at k = 3 and 4, the fold at k = 3
    expected = [-1.0, -1.5, -3.0, -3.125, -3.1875, -3.375]
    assert [company.step(0, 1.0)[0] for _ in range(6)] == expected


def test_not_waiting_gathers_while_a_push_is_under_way():
    company = Company(ParameterServer(wait=False), 1, start=0.0, served=False)
    assert company.step(0, 1.0) == (-1.0, 0, 1, 1)  # pushes 1
    assert company.step(0, 2.0) == (-3.0, 0, 1, 2)
    assert company.step(0, 4.0) == (-7.0, 0, 1, 3)
    assert company.serve() == 1
    assert company.step(0, 8.0) == (-1.0, 1, 2, 0)  # pulls, and pushes 2 + 4 + 8
    assert company.serve() == 1
    assert company.value() == -15.0
    assert company.step(0, 0.0) == (-15.0, 2, 2, 0)
    assert not company.fabric.waited[:-2]  # the centre waited, the learner never


def test_a_missed_deadline_goes_on_and_the_answer_is_taken_when_it_comes():
    company = Company(ParameterServer(deadline_seconds=0.2), 1, start=0.0, served=False)
    assert company.step(0, 1.0) == (-1.0, 0, 1, 1)
    assert sum(company.fabric.waited) == pytest.approx(0.2)
    company.fabric.waited.clear()
    assert company.step(0, 2.0) == (-3.0, 0, 1, 2)
    assert company.fabric.waited == []  # one push under way is enough to wait for
    company.serve()
    company.fabric.while_waiting = company.serve
    assert company.step(0, 4.0) == (-7.0, 1, 2, 0)  # the late answer, the push of 6, its answer: one round
    assert company.value() == -7.0


def test_a_reply_that_is_no_longer_awaited_is_not_taken():
    """A process that takes the place of another may find the replies to that one's pushes."""
    company = Company(ParameterServer(wait=False), 1, start=0.0, served=False)
    company.fabric.mail[0, "parameters"].append(Message(1, torch.tensor([100.0], dtype=torch.float64), 9.0))
    assert company.step(0, 1.0) == (-1.0, 0, 1, 1)
    assert company.step(0, 2.0) == (-3.0, 0, 1, 2)


class TestDelayBound:
    def three(self, bound):
        """Client 1 computes on version 0 while client 0 has three folds made."""
        company = Company(ParameterServer(delay_bound=bound), 2, start=0.0)
        for _ in range(3):
            company.step(0, 1.0)
        return company

    def test_as_old_as_the_bound_is_folded(self):
        company = self.three(3)
        assert company.step(1, 10.0) == (-13.0, 1, 2, 0)
        assert company.centre.strategy.refused == company.bound_replicas[1].strategy.refused == 0

    def test_older_is_refused_and_counted_and_the_client_goes_on_from_the_fresh_parameters(self):
        company = self.three(2)
        assert company.step(1, 10.0) == (-3.0, 1, 2, 0)
        assert company.value() == -3.0
        assert company.centre.replica.clock == 3
        assert company.centre.strategy.refused == company.bound_replicas[1].strategy.refused == 1
        assert company.step(1, 10.0)[0] == company.value() == -13.0  # now it is of version 3

    def test_a_sum_is_as_old_as_its_oldest_gradient(self):
        company = Company(ParameterServer(wait=False, delay_bound=1), 2, start=0.0, served=False)
        company.step(1, 1.0)  # pushed, of version 0
        company.step(1, 10.0)  # gathered, of version 0
        company.serve()
        company.step(1, 100.0)  # pulls version 1, but pushes 110 of version 0
        assert company.fabric.sent[-1][3:] == ([110.0], 0.0)
        company.step(0, 1.0)
        company.fabric.mail[2, "gradient"].rotate()  # the other's comes first: folds are 2 now
        company.serve()
        assert company.value() == -2.0
        assert company.centre.strategy.refused == 1

    def test_a_sum_with_a_gradient_from_before_the_pull_is_as_old_as_that(self):
        company = Company(ParameterServer(period=2, wait=False), 1, start=0.0, served=False)
        for _ in range(2):
            company.step(0, 1.0)
        company.serve()
        company.step(0, 10.0)  # of version 0; then it pulls version 1
        company.step(0, 100.0)  # of version 1
        assert [x for *_, x, note in company.fabric.sent if note == 0.0] == [[2.0], [110.0]]

    def test_what_was_gathered_behind_a_refused_push_is_dropped_with_it(self):
        company = Company(ParameterServer(wait=False, delay_bound=1), 2, start=0.0, served=False)
        for _ in range(2):
            company.step(0, 1.0)
            company.serve()
        assert company.centre.replica.clock == 2
        company.step(1, 10.0)
        company.step(1, 20.0)
        company.serve()
        assert company.centre.strategy.refused == 1
        at = company.value()
        assert company.step(1, 40.0)[0] == at  # that one was made from old parameters too
        assert company.serve() == 0
        company.step(1, 80.0)
        assert company.fabric.sent[-1][3] == [80.0]

    def test_zero_refuses_nothing(self):
        company = self.three(0)
        assert company.step(1, 10.0)[0] == -13.0


def test_the_death_of_the_centre_is_an_error_for_all_that_push_or_wait():
    company = Company(ParameterServer(period=5), 3, start=0.0)
    company.fabric.dead.add(3)
    with pytest.raises(
        FabricError,
        match=r"rank 3, which kept the centre, is dead or out of reach.*murmurate resume; a script",
    ):
        company.step(0, 1.0)
    waiting = Company(ParameterServer(), 1, served=False)
    waiting.fabric.while_waiting = lambda: waiting.fabric.dead.add(1)
    with pytest.raises(FabricError, match="rank 1"):
        waiting.step(0, 1.0)
    assert sum(waiting.fabric.waited) < 0.2  # of ten seconds


def test_a_full_queue_keeps_the_gradient_for_the_next_push():
    company = Company(ParameterServer(), 1, start=0.0)
    fabric, send = company.bound_replicas[0].channel, company.bound_replicas[0].channel.send
    fabric.send = lambda *_, **__: False
    assert company.step(0, 1.0) == (-1.0, 0, 1, 1)
    fabric.send = send
    assert company.step(0, 2.0) == (-3.0, 1, 2, 0)
    assert company.fabric.sent[0][3] == [3.0]


def test_a_state_brings_everything_and_that_of_a_peer_all_but_its_gradient():
    company = Company(ParameterServer(delay_bound=2), 2, start=0.0)
    for _ in range(3):
        company.step(0, 1.0)
    company.step(1, 10.0)  # refused; it pulls version 3
    company.fabric.while_waiting = lambda: None
    company.step(1, 1.0)  # pushed, and not answered
    company.step(1, 4.0)
    state = company.bound_replicas[1].strategy.state()
    numbers = {"rank": 1, "summed": 1, "oldest": 3, "version": 3, "rounds": 1, "pulled_at": 1, "refused": 1}
    assert state == {"gradient": torch.tensor([4.0]), **numbers}
    peer, own = (bound.strategy for bound in Company(ParameterServer(delay_bound=2), 2).bound_replicas[:2])
    own.load(state)
    peer.load(state)
    assert own.state() == state
    assert peer.state() | {"oldest": 0} == {
        "gradient": torch.tensor([0.0]), **numbers, "rank": 0, "summed": 0, "oldest": 0
    }  # fmt: skip


def test_what_makes_no_sense_is_an_error():
    with pytest.raises(ValueError, match="period"):
        ParameterServer(period=0)
    with pytest.raises(ValueError, match="delay_bound"):
        ParameterServer(delay_bound=-1)
