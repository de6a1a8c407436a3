"""The seconds of an iteration are divided among the primitives, and none is counted twice."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from murmurate.mapping import timers
from murmurate.replica.vector import Replica


@pytest.mark.parametrize("follows", [False, True])
def test_the_strategys_step_is_counted_once(follows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])

    class Slow(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            seconds[0] += 5.0

    module = nn.Linear(2, 1)
    replica = Replica("net", module, lambda parameters: Slow(parameters, lr=0.1))
    clock = timers.Clock()
    timers._attach_replica(replica, clock)

    def learn(x: Tensor) -> None:
        loss = module(x).mean()
        seconds[0] += 2.0
        if follows:
            replica.follow(replica.grad)
        else:
            replica.descend(loss)

    clock.timed("learn", learn)(torch.ones(1, 2))
    found = timers.primitives_of(clock.taken(), total=8.0)
    assert (found["forward"], found["backward"], found["update"], found["loop"]) == (2.0, 0.0, 5.0, 1.0)
