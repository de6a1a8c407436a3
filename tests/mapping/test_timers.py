"""The seconds of an iteration are divided among the primitives, and none is counted twice."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

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


def test_waiting_for_copies_that_were_begun_ahead_is_part_of_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])

    def taking(own: float, *calls: tuple[Any, str]) -> Any:
        def call() -> None:
            seconds[0] += own
            for owner, method in calls:
                getattr(owner, method)()

        return call

    replay = SimpleNamespace(observe=taking(1.0), choose=taking(2.0), gather=taking(0.5), update=taking(0.0))
    drawing = taking(7.5, (replay, "choose"), (replay, "gather"))
    sampler = SimpleNamespace(before_steps=taking(4.0), next=drawing)
    steps = ((sampler, "before_steps"), (replay, "observe"), (sampler, "next"))

    class Source:
        def __init__(self) -> None:
            self.sampler, self.replay = sampler, replay

        def __next__(self) -> None:
            taking(16.0, *steps)()

    iterations: list[dict[str, float]] = []
    timer = SimpleNamespace(end_iteration=lambda: None)
    loop: Any = SimpleNamespace(learner=SimpleNamespace(replicas={}), source=Source(), timer=timer)
    timers.attach(loop, timers.Clock(), iterations)
    next(loop.source)
    loop.timer.end_iteration()
    [found] = iterations
    own = {name: found[name] for name in ("collect", "insert", "sample", "gather", "total")}
    assert own == {"collect": 16.0, "insert": 1.0, "sample": 2.0, "gather": 12.0, "total": 31.0}
