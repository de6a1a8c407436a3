"""Replicas that live as a test says, a clock turned by hand, and the failure detector that sees them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.spawn import DIED, Exit
from murmurate.launch.failure_detector import FailureDetector
from murmurate.recipes import recipe
from murmurate.strategies import strategies

PACE = 0.1
CAP_SECONDS = 45.0


class Worker:
    """What the detector sees of a worker process."""

    def __init__(self, rank: int, joins: bool = False) -> None:
        self.rank, self.joins = rank, joins
        self.exit: Exit | None = None
        self.killed_because = ""
        self.killed = self.is_stopped = self.dumped = False

    @property
    def ended(self) -> bool:
        return self.exit is not None

    def kill(self, because: str = "") -> None:
        self.killed, self.killed_because = True, because

    def dump_stacks(self) -> bool:
        self.dumped = True
        return True


class Scene:
    """Three replicas that live as the test says, and what the failure detector makes of it."""

    def __init__(self, strategy: str = "all-reduce", replicas: int = 3, **fields: Any) -> None:
        self.now = 1000.0
        self.events: list[tuple[str, int]] = []
        self.messages: list[str] = []
        self.joined: list[tuple[int, int]] = []
        fields = {"hang_after_seconds": CAP_SECONDS, **fields}
        run = dataclasses.replace(
            recipe("cartpole-gala"), strategy=strategies()[strategy](), replicas=replicas, **fields
        )
        self.run_state = RunState(run.members)
        self.run_state.open()
        self.coordinator: Any = SimpleNamespace(
            run_state=self.run_state,
            run=run,
            should_end=False,
            is_saving=False,
            is_admitting=False,
            name=lambda rank: f"member {rank}",
            event=self._event,
            joined=lambda rank, donor: self.joined.append((rank, donor)),
        )
        self.workers = {rank: Worker(rank) for rank in range(run.members)}
        processes: Any = SimpleNamespace(by_rank=self.workers)
        self.detector = FailureDetector(processes, self.coordinator, self._start_again, lambda: self.now)
        self.silent: set[int] = set()
        for rank in range(run.members):
            self.run_state.set_pace(rank, PACE)

    def _event(self, name: str, message: str, member: int, **more: Any) -> None:
        self.events.append((name, member))
        self.messages.append(message)

    def _start_again(self, rank: int) -> None:
        self.workers[rank] = Worker(rank, joins=True)

    def live(self, seconds: float, step: float = 0.1) -> None:
        for _ in range(round(seconds / step)):
            self.now += step
            for worker in self.workers.values():
                if worker.rank not in self.silent and not worker.ended:
                    self.run_state.heartbeat(worker.rank)
            self.detector.poll()

    def die(self, rank: int) -> None:
        self.workers[rank].exit = Exit(DIED)
        self.run_state.mark_dead(rank)
        self.detector.died(self.workers[rank])

    def told(self, rank: int) -> list[str]:
        return [name for name, member in self.events if member == rank]
