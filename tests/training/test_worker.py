"""What a checkpoint takes of a vector that others write at that moment."""

import torch
from torch import nn

from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.solo import Solo
from murmurate.training.worker_context import member_state


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
