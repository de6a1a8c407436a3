"""What a script measures: waiting in steps and collectives, and the replicas' disagreement."""

from __future__ import annotations

import math

import pytest
import torch

from murmurate.strategies.elastic import Elastic
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.local_sgd import LocalSGD
from replicator.steps import alone, loops, processes


def test_waiting_for_a_slow_replicas_batches_is_counted():
    """Replicas with batches of their own agree on whether all have a next one: there they wait."""

    def script(loop):
        def slow_on_rank_0(rank):
            for _ in range(2):
                loop.fabric.compute(3.0 if rank == 0 else 0.0)  # seconds of the simulation
                yield torch.ones(1)

        optimizer = loop.wrap_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
        for _ in loop.inputs(slow_on_rank_0, per="replica"):
            optimizer.step()
        return loop.waiting_seconds

    slow, quick = loops(2, script)
    assert quick == pytest.approx(6.0, abs=0.1)
    assert slow < 0.1


def apart(loop):
    """After a step each: the parameters of replica r are (3 + r, 0) and (4, 0)."""
    one, two = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizers = [loop.wrap_optimizer(torch.optim.SGD([x], lr=1.0)) for x in (one, two)]
    one.grad[0], two.grad[0] = -3.0 - loop.rank, -4.0
    for optimizer in optimizers:
        optimizer.step()
    bytes_before = loop.bytes_exchanged
    before = loop.disagreement()
    assert loop.bytes_exchanged == bytes_before, "measuring is not counted"
    loop.finish(60.0)
    return before, loop.disagreement()


# the mean is (3.5, 0) and (4, 0), of norm sqrt(28.25), and each replica is 0.5 from it
SPREAD = 0.5 / math.sqrt(28.25)


def test_synchronous_replicas_measure_their_disagreement_together():
    for pair in loops(2, apart, processes, LocalSGD(period=10)):
        assert pair == pytest.approx((SPREAD, SPREAD))


@pytest.mark.filterwarnings("ignore:no update of")
def test_asynchronous_replicas_measure_it_from_what_is_published():
    """Under elastic that is nothing before a replica has ended; the first to measure knows of no other."""
    *replicas, _ = loops(3, apart, strategy=Elastic(period=10))
    assert any(math.isnan(before) for before, _ in replicas)
    assert [after for _, after in replicas] == pytest.approx([SPREAD, SPREAD])


def test_one_replica_and_those_of_one_vector_do_not_disagree():
    assert alone(apart) == (0.0, 0.0)
    for pair in loops(2, apart, processes, Hogwild()):
        assert pair == (0.0, 0.0)
