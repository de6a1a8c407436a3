"""What a checkpoint takes of a vector that others write at that moment, and who resumes from which part."""

import torch
from torch import nn

from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.solo import Solo
from murmurate.training.worker_context import member_state, parts_to_resume


def test_a_vector_that_others_write_meanwhile_is_not_taken_for_one_with_nans(monkeypatch):
    """isfinite compares x with x and reads it twice for that: of shared memory it must see a copy.

    The race itself came up about once in a thousand updates of four processes.
    """

    def member(fabric):
        replicator = Replicator(Solo(), fabric)
        replica = replicator.replicate("model", nn.Linear(3, 3), lambda p: torch.optim.SGD(p, lr=0.1))
        looked_at = []

        def races(x):
            looked_at.append(x.data_ptr())
            return x == x + (x.data_ptr() == replica.params.data_ptr())  # as if written between two reads

        monkeypatch.setattr(torch, "isfinite", races)
        member_state(replicator, 0.0)
        assert looked_at

    SimulatedFabric(1, seed=0).run([member])


def test_a_replica_that_had_died_resumes_from_the_one_that_led_its_node_after_it():
    nodes = ((0, 1, 2), (3, 4, 5))  # of DPSGD; 6 is the centre
    parts = parts_to_resume([1, 2, 4, 5, 6], 6)
    assert parts == {0: 1, 1: 1, 2: 2, 3: 4, 4: 4, 5: 5, 6: 6}
    for dead in ({0, 3}, {0, 3, 4}, {0, 1, 3}):
        living = [rank for rank in range(7) if rank not in dead]
        for node in nodes:
            assert parts_to_resume(living, 6)[min(node)] == min(set(node) - dead)


def test_the_last_replica_resumes_from_the_first_if_it_had_died():
    assert parts_to_resume([0, 2], 4) == {0: 0, 1: 2, 2: 2, 3: 0}
