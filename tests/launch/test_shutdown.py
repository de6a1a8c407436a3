"""When a launcher no longer waits for those who do not end, with a clock that is turned by hand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from murmurate.fabric.processes.run_state import RunState
from murmurate.launch.shutdown import STOP_DEADLINE_SECONDS, Shutdown
from murmurate.ranges import PositiveInt
from murmurate.recipes import recipe
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.elastic import SynchronousElastic
from murmurate.strategies.interface import Strategy
from murmurate.strategies.local_sgd import LocalSGD
from murmurate.strategies.parameter_server import ParameterServer
from murmurate.strategies.pull_gossip import PullGossip
from murmurate.strategies.synchronous_gossip import SynchronousGossip

SAVING_SECONDS = 30.0
DEADLINE = STOP_DEADLINE_SECONDS + SAVING_SECONDS
HANG_SECONDS = 120.0
NEVER = None


class Scene:
    """Three replicas and a centre, asked to end by nobody."""

    def __init__(self) -> None:
        self.now = 1000.0
        run = dataclasses.replace(recipe("cartpole-gala"), strategy=ParameterServer(), replicas=3)
        self.run_state = RunState(run.members)
        self.run_state.open()
        self.coordinator: Any = SimpleNamespace(
            run_state=self.run_state, run=run, should_end=False, saving_seconds=SAVING_SECONDS
        )
        self.ending = Shutdown(self.coordinator, lambda: self.now)

    def overdue_after(self, beating: tuple[int, ...], limit: float = 600.0) -> float | None:
        """Seconds; None if not within ``limit``."""
        began = self.now
        while self.now - began < limit:
            self.now += 0.5
            for rank in beating:
                self.run_state.heartbeat(rank)
            if self.ending.is_overdue():
                return self.now - began
        return NEVER


def test_slow_steps_have_as_much_time_as_while_the_run_goes_on() -> None:
    scene = Scene()
    run = dataclasses.replace(scene.coordinator.run, hang_after_seconds=600.0)
    scene.coordinator.run = run
    scene.ending = Shutdown(scene.coordinator, lambda: scene.now)
    scene.coordinator.should_end = True
    assert scene.overdue_after((0, 1, 2), limit=1000.0) == pytest.approx(480.0 + DEADLINE, abs=1.0)


def test_long_batches_are_waited_for() -> None:
    scene = Scene()
    scene.coordinator.should_end = True
    scene.run_state.set_pace(1, 100.0)
    assert scene.overdue_after((0, 1, 2)) == pytest.approx(100.0 + DEADLINE, abs=1.0)
    scene.run_state.mark_dead(1)
    assert scene.overdue_after((0, 2)) == pytest.approx(DEADLINE, abs=1.0)


@dataclass
class EveryFew(AllReduce):
    """Its rounds are as long as a field says that is not called period."""

    exchange_every: PositiveInt = 7
    period_field: ClassVar[str] = "exchange_every"


@pytest.mark.parametrize(
    ("strategy", "batches"),
    [
        (AllReduce(), 1),
        (LocalSGD(period=30), 30),
        (LocalSGD(period=5000), 100),
        (SynchronousGossip(period=20), 20),
        (SynchronousElastic(period=15), 15),
        (EveryFew(), 7),
        (PullGossip(period=50), 1),  # it has no common rounds
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Strategy) else None,
)
def test_members_that_decide_together_have_the_time_of_a_round(strategy: Strategy, batches: int) -> None:
    scene = Scene()
    scene.coordinator.run = dataclasses.replace(scene.coordinator.run, strategy=strategy)
    scene.coordinator.should_end = True
    scene.run_state.set_pace(0, 2.0)
    assert scene.overdue_after((0, 1, 2)) == pytest.approx(2.0 * batches + DEADLINE, abs=1.0)


@pytest.mark.parametrize(
    ("finished", "dead", "beating", "due", "seconds"),
    [
        ((), (), (0, 1, 2), False, NEVER),
        ((), (), (), False, NEVER),  # whoever is stopped may go on, and the others wait in vain for nothing
        ((), (), (0, 1, 2), True, DEADLINE),
        ((0, 1), (), (2,), False, NEVER),
        ((0,), (), (2,), False, NEVER),
        ((0, 1), (), (), False, HANG_SECONDS + DEADLINE),
        ((0, 1), (2,), (), False, DEADLINE),  # the centre is left
        ((0, 1, 2), (), (3,), False, DEADLINE),
        ((), (0, 1, 2), (), False, DEADLINE),
    ],
)
def test_which_members_are_waited_for_and_how_long(
    finished: tuple[int, ...],
    dead: tuple[int, ...],
    beating: tuple[int, ...],
    due: bool,
    seconds: float | None,
) -> None:
    scene = Scene()
    for rank in finished:
        scene.run_state.mark_finished(rank)
    for rank in dead:
        scene.run_state.mark_dead(rank)
    scene.coordinator.should_end = due
    assert scene.overdue_after(beating) == (seconds if seconds is NEVER else pytest.approx(seconds, abs=1.5))


def test_a_stopped_one_that_goes_on_has_all_its_time_again() -> None:
    scene = Scene()
    scene.run_state.mark_finished(0)
    scene.run_state.mark_finished(1)
    assert scene.overdue_after((), limit=HANG_SECONDS + DEADLINE - 5.0) is NEVER
    assert scene.overdue_after((2,), limit=1.0) is NEVER
    assert scene.overdue_after(()) == pytest.approx(HANG_SECONDS + DEADLINE, abs=1.5)


def test_while_the_launcher_itself_was_stopped_no_member_was_silent() -> None:
    scene = Scene()
    scene.run_state.mark_finished(0)
    scene.run_state.mark_finished(1)
    scene.now += 3600.0
    assert scene.overdue_after(()) == pytest.approx(HANG_SECONDS + DEADLINE, abs=1.5)


def test_while_the_launcher_itself_was_stopped_no_deadline_came_nearer() -> None:
    scene = Scene()
    scene.coordinator.should_end = True
    assert scene.overdue_after((0, 1, 2), limit=DEADLINE - 20.0) is NEVER
    scene.now += 3600.0
    assert scene.overdue_after((0, 1, 2)) == pytest.approx(20.0, abs=1.5)


def test_the_deadline_starts_again_for_the_members_that_are_left() -> None:
    scene = Scene()
    scene.coordinator.should_end = True
    assert scene.overdue_after(()) is not NEVER
    assert scene.overdue_after(()) == pytest.approx(DEADLINE, abs=1.5)
