"""Schedules of learning rates that follow the env steps of all replicas together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from murmurate.replica.vector import Replica
from murmurate.training.run import Run

_CHECKS = 400  # in a run, as each costs a part of a millisecond
_TOLERANCE = 0.01  # relative to the planned updates


class SharedSchedules:
    """Keeps the schedules of a member of a run with the run.

    Schedules count the replica's own updates, and a run ends once all replicas together have made
    ``run.env_steps``. A replica that is faster than others, or whose peers have died, makes more updates than
    planned: its rate would fall too early. So where its updates differ by more than a hundredth of the plan
    from what the env steps of all replicas allow, the schedule follows these.

    A strategy that counts the updates of all replicas (``counts_all``) may have to estimate them, and then
    its count is corrected in the same way, also at a centre that makes the optimizer's steps.
    """

    def __init__(self, run: Run, replicas: Iterable[Replica]) -> None:
        self._run, self._planned = run, run.planned_updates() or 0
        self._at_once = run.source.batches_at_once(run)
        follows = run.env_steps is not None and run.members > 1
        self._counted = run.replicas if run.strategy.counts_all else 1  # replicas whose updates are counted
        self._checked_at = 0  # env steps of all replicas
        self._ahead = 0  # by how many updates the run is ahead of the strategy's counts
        scheduled = [replica for replica in replicas if follows and replica.schedule is not None]
        self._counts = [self._correct(replica) for replica in scheduled]

    def _correct(self, replica: Replica) -> Callable[[], int]:
        """Correct what the replica's schedule counts from now on; returns the strategy's count of it."""
        count: Callable[[], int] = replica.count_steps_by(lambda: max(0, count() + self._ahead))
        return count

    def follow(self, env_steps: int) -> None:
        """To be called with the env steps of all replicas so far; synchronous members call it with the same
        numbers at the same updates."""
        if not self._counts or self._run.env_steps is None:
            return
        if env_steps - self._checked_at < self._run.env_steps / _CHECKS:
            return
        self._checked_at = env_steps
        expected = dataclasses.replace(self._run, env_steps=env_steps).planned_updates() or 0
        # where env steps are followed by many batches, they are counted with the first of these
        updates = self._run.learner.updates(1)
        expected -= (self._at_once - 1) * updates
        # a learner's own updates are those of its first replica that has a schedule
        ahead = self._counted * expected - self._counts[0]()
        least = self._counted * max(_TOLERANCE * self._planned, 2 * self._at_once * updates)
        self._ahead = ahead if abs(ahead) > least else 0

    def state(self) -> tuple[int, int]:
        """What a replica that joins needs, to go on as this one does."""
        return self._checked_at, self._ahead

    def load(self, state: tuple[int, int]) -> None:
        self._checked_at, self._ahead = state
