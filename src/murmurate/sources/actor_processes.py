"""Starts and watches the actor processes of a learner, and restarts those that die or hang."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from murmurate.agents.interface import Agent
from murmurate.errors import RunFailed
from murmurate.fabric.processes.module_process import Inherited, ModuleProcess, end_process, start_module
from murmurate.fabric.processes.process_handle import is_stopped
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.replicator.learner import updates_of
from murmurate.sources.actor_agent import ActorSettings, published_tensors
from murmurate.sources.polling import LONGEST_SECONDS
from murmurate.sources.shared_ring import ActorFailure, SharedParameters
from murmurate.worlds.interface import SimulatorWorld

_CHECK_SECONDS = 0.5  # between two checks of the actor processes
# an actor counts as hung once the time since its last step exceeds both this limit and ``_SLOWEST_FACTOR``
# times the longest time between two of its steps so far
_SILENCE_SECONDS = 60.0
_STOPPED_SECONDS = 10.0  # the limit while the operating system reports the process as stopped
_SLOWEST_FACTOR = 20
_STARTUP_SECONDS = 300.0  # the limit before the first step
_MAX_DEATHS = 5  # the run fails after so many deaths of one actor in a row without a record sent in between


class MonitoredRing(Protocol):
    """The queue from an actor to its learner."""

    @property
    def waiting_records(self) -> int:
        """Number of records that the learner has not taken yet."""
        ...

    @property
    def beats(self) -> int:
        """Grows with each step of the actor."""
        ...


R = TypeVar("R", bound=MonitoredRing)


@dataclass(frozen=True)
class ActorPlan:
    """The actors of a learner.

    actors: number of processes that share its ``simulators``. rank, replicas: rank of the learner, and number
        of learners; the epsilons are spread over the simulators of all learners. random_env_steps: number of
        random env steps of all these actors together.
    queue: greatest number of one actor's trajectories that may wait for the learner, where actors send
        trajectories. poll_seconds: the longest time between two polls of an actor whose ring is full.
    """

    world: SimulatorWorld
    agent: Any  # a LearnerConfig that requires env steps
    actors: int
    simulators: int
    rank: int
    replicas: int
    random_env_steps: int = 0
    queue: int = 0
    poll_seconds: float = LONGEST_SECONDS


@dataclass
class ActorProcess(Generic[R]):
    """One actor process.

    first_simulator: index of the actor's first simulator among the learner's simulators. silent_seconds: time
    since its last step. longest_seconds: the longest time between two of its steps. silent_deaths: number of
    deaths since the last record was sent.
    """

    index: int
    first_simulator: int
    simulators: int
    memory_file: SharedMemoryFile
    ring: R
    failure: ActorFailure
    process: ModuleProcess | None = None
    starts: int = 0
    silent_deaths: int = 0
    has_stepped: bool = False  # whether it made a step since it was last started
    beats: int = 0
    silent_seconds: float = 0.0
    longest_seconds: float = 0.0

    def note_step(self) -> None:
        if self.has_stepped:
            self.longest_seconds = max(self.longest_seconds, self.silent_seconds)
        self.has_stepped, self.silent_seconds = True, 0.0

    def note_record(self) -> None:
        self.note_step()
        self.silent_deaths = 0

    @property
    def is_hung(self) -> bool:
        if self.silent_seconds > _STOPPED_SECONDS and self.process and is_stopped(self.process.pid):
            return True
        if not self.has_stepped:
            return self.silent_seconds > _STARTUP_SECONDS
        return self.silent_seconds > max(_SILENCE_SECONDS, _SLOWEST_FACTOR * self.longest_seconds)

    def kill(self) -> None:
        if self.process is not None:
            end_process(self.process)
            self.process = None


class ActorProcesses(Generic[R]):
    """The actor processes of a learner, and the parameters that they act with.

    module: name of the module that the processes run. make_ring: called with a shared-memory file and an
    actor's number of simulators; makes the actor's ring in the file.
    """

    def __init__(
        self,
        plan: ActorPlan,
        learner: Agent,
        module: str,
        make_ring: Callable[[SharedMemoryFile, int], R],
        *,
        seed: int,
    ) -> None:
        self.plan, self._module, self._seed = plan, module, seed
        self._learner = learner
        self._memory_file = SharedMemoryFile.create()
        count = sum(x.numel() for x in published_tensors(learner))
        self.parameters = SharedParameters(self._memory_file, count)
        bounds = [plan.simulators * k // plan.actors for k in range(plan.actors + 1)]
        self.actors: list[ActorProcess[R]] = []
        for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
            memory_file = SharedMemoryFile.create()
            ring = make_ring(memory_file, stop - start)
            failure = ActorFailure(memory_file)
            self.actors.append(ActorProcess(index, start, stop - start, memory_file, ring, failure))
        self.events: list[tuple[str, str]] = []
        self._next_actor = 0
        self._checked_at = 0.0
        self._started = False

    @property
    def deaths(self) -> int:
        return sum(actor.starts - 1 for actor in self.actors if actor.starts)

    def taken_events(self) -> Sequence[tuple[str, str]]:
        """Events since the last call: (kind, message)."""
        events, self.events = self.events, []
        return events

    def publish(self, version: int) -> None:
        """Publish the learner's current parameters to the actors."""
        vectors = [x.detach().flatten().float().cpu() for x in published_tensors(self._learner)]
        self.parameters.publish(vectors[0] if len(vectors) == 1 else torch.cat(vectors), version)

    def publish_if_due(self, every: int) -> None:
        """Publish if the learner has made ``every`` updates since the last time, and at the first call."""
        version, published_version = updates_of(self._learner) + 1, self.parameters.version
        if not published_version or version >= published_version + every:
            self.publish(version)

    def start(self, batches: int, played: int = 0) -> None:
        """Start all actors, at the first call; parameters must have been published. batches: number of the
        learner's batches so far; the actors' seeds depend on it, so a resumed run has new seeds. played: env
        steps of all actors so far, which count towards ``random_env_steps``."""
        if not self._started:
            self._started = True
            for actor in self.actors:
                self._spawn(actor, batches, played)

    def next_waiting(self) -> ActorProcess[R] | None:
        """The next actor, in round-robin order, with a record that has not been taken yet."""
        for _ in self.actors:
            actor = self.actors[self._next_actor % len(self.actors)]
            self._next_actor += 1
            if actor.ring.waiting_records:
                actor.note_record()
                return actor
        return None

    def check(self, batches: int, played: int = 0) -> None:
        """Restart each actor that has died or hangs; the records that it sent remain in its ring. batches,
        played: as in ``start``.

        Raises RunFailed for an actor that failed for good, or died again and again without having sent steps.
        """
        elapsed = time.monotonic() - self._checked_at
        if elapsed < _CHECK_SECONDS:
            return
        self._checked_at += elapsed
        for actor in self.actors:
            if actor.process is None:
                continue
            if actor.ring.beats != actor.beats:
                actor.beats = actor.ring.beats
                actor.note_step()
            if actor.ring.waiting_records:  # a dead actor is restarted only once these are taken
                continue
            # a longer interval is a delay of this process, not silence of the actor
            actor.silent_seconds += min(elapsed, 2 * _CHECK_SECONDS)
            name, code = f"actor {actor.index} of replica {self.plan.rank}", actor.process.poll()
            if code is not None:
                cause = f"signal {-code}" if code < 0 else f"exit code {code}"
            elif actor.is_hung:
                cause = f"hung: no step for {actor.silent_seconds:.0f} s"
            else:
                continue
            if code is not None and (sentence := actor.failure.read()):
                raise RunFailed(f"{name}: {sentence}")
            actor.kill()
            actor.silent_deaths += 1
            if actor.silent_deaths >= _MAX_DEATHS:
                raise RunFailed(
                    f"{name} died {_MAX_DEATHS} times without having sent any steps ({cause}). See its "
                    "output in logs/ in the run folder."
                )
            self.events.append(("actor died", f"{name} died ({cause}) and is started again"))
            self._spawn(actor, batches, played)

    def _spawn(self, actor: ActorProcess[R], batches: int, played: int) -> None:
        plan = self.plan
        random_env_steps = max(0, plan.random_env_steps - played)
        settings = ActorSettings(
            world=plan.world,
            agent=plan.agent,
            simulators=actor.simulators,
            first_simulator=actor.first_simulator,
            global_first_simulator=plan.rank * plan.simulators + actor.first_simulator,
            total_simulators=plan.replicas * plan.simulators,
            seed=self._seed,
            incarnation=f"{batches} {actor.starts}",
            starts_before=actor.starts,
            random_env_steps=random_env_steps * actor.simulators // plan.simulators,
            queue=plan.queue,
            poll_seconds=plan.poll_seconds,
            parameters=(Inherited(self._memory_file.descriptor), len(self.parameters)),
            ring=Inherited(actor.memory_file.descriptor),
        )
        actor.process = start_module(
            self._module, (self._memory_file.descriptor, actor.memory_file.descriptor)
        )
        actor.starts += 1
        actor.has_stepped, actor.silent_seconds = False, 0.0
        if actor.process.stdin is None:
            raise RuntimeError("the actor process has no stdin")
        try:
            actor.process.stdin.write(pickle.dumps(settings))
            actor.process.stdin.flush()  # stdin stays open: the actor exits when it is closed
        except BrokenPipeError:
            pass  # the next check finds the actor dead
        message = f"actor {actor.index} of replica {plan.rank} began, process {actor.process.pid}"
        self.events.append(("actor began", message))

    def close(self) -> None:
        for actor in self.actors:
            actor.kill()
            actor.memory_file.close()
        self._memory_file.close()
