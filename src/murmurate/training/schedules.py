"""Schedules of learning rates that follow the run, which may not end as planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from murmurate.replica.vector import Replica
from murmurate.training.run import Run

_CHECKS = 400  # in a run, as each costs a part of a millisecond
_TOLERANCE = 0.01  # relative to the planned updates


class SharedSchedules:
    """Keeps the schedules of a member of a run with the run.

    Schedules count the replica's own updates, and a run usually ends once all replicas together have made
    ``run.env_steps``. A replica that is faster than others, or whose peers have died, makes more updates than
    planned: its rate would fall too early. So where its updates differ by more than a hundredth of the plan
    from what the env steps of all replicas allow, the schedule follows these. But if ``run.updates`` is
    reached first, each replica ends after so many updates of its own, which are then what counts.

    A strategy that counts the updates of all replicas (``counts_all``) may have to estimate them, and in a
    run that ends by updates those of the dead are missing. Its count is corrected in the same way, also at a
    centre that makes the optimizer's steps.
    """

    def __init__(self, run: Run, replicas: Iterable[Replica]) -> None:
        self._run, self._planned = run, run.planned_updates() or 0
        self._at_once = run.source.batches_at_once(run)
        self._ends_by_updates = run.updates is not None and run.updates == self._planned
        counts_all = run.strategy.counts_all
        follows = run.members > 1 and (counts_all if self._ends_by_updates else run.env_steps is not None)
        self._counted = run.replicas if counts_all else 1  # replicas whose updates are counted
        self._checked_at = 0  # env steps of all replicas
        self._ahead = 0  # by how many updates the run is ahead of the strategy's counts
        scheduled = [replica for replica in replicas if follows and replica.schedule is not None]
        self._counts = [self._correct(replica) for replica in scheduled]

    def _correct(self, replica: Replica) -> Callable[[], int]:
        """Correct what the replica's schedule counts from now on; returns the strategy's count of it."""
        count: Callable[[], int] = replica.count_steps_by(lambda: max(0, count() + self._ahead))
        return count

    def follow(self, env_steps: int, updates: int) -> None:
        """To be called with the env steps of all replicas and the own updates so far; synchronous members
        call it with the same numbers at the same updates. updates: at a centre, the living replicas' mean."""
        if not self._counts:
            return
        expected = updates if self._ends_by_updates else self._allowed(env_steps)
        if expected is None:
            return
        # a learner's own updates are those of its first replica that has a schedule
        ahead = self._counted * expected - self._counts[0]()
        updates_at_once = self._at_once * self._run.learner.updates(1)
        least = self._counted * max(_TOLERANCE * self._planned, 2 * updates_at_once)
        self._ahead = ahead if abs(ahead) > least else 0

    def _allowed(self, env_steps: int) -> int | None:
        """The updates of a replica that so many env steps of all allow; None if the last check was not long
        ago."""
        if self._run.env_steps is None or env_steps - self._checked_at < self._run.env_steps / _CHECKS:
            return None
        self._checked_at = env_steps
        allowed = dataclasses.replace(self._run, env_steps=env_steps).planned_updates() or 0
        # where env steps are followed by many batches, they are counted with the first of these
        return allowed - (self._at_once - 1) * self._run.learner.updates(1)

    def state(self) -> tuple[int, int]:
        """What a replica that joins needs, to go on as this one does."""
        return self._checked_at, self._ahead

    def load(self, state: tuple[int, int]) -> None:
        self._checked_at, self._ahead = state
