"""An actor that makes trajectories (Espeholt et al. 2018, section 3).

It is a process with simulators. It makes each trajectory with a single version of the parameters, the newest.
"""

from __future__ import annotations

import sys

from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.sources.actor_agent import ActorAgent, ActorSettings, run_actor
from murmurate.sources.rollouts import RolloutSource
from murmurate.sources.trajectory_ring import TrajectoryRing, TrajectoryShape
from murmurate.spec import derive_seed


def make_trajectories(settings: ActorSettings) -> None:
    """Without end: wait for room, fetch the newest parameters, act for T steps, send the trajectory."""
    simulators = settings.world.open(settings.simulators, training=True, first=settings.first_simulator)
    actor_agent = ActorAgent(settings, simulators.spec)
    requires = settings.agent.requires
    memory = actor_agent.agent.initial_memory(1)
    shape = TrajectoryShape(
        simulators.spec,
        requires.steps,
        settings.simulators,
        0 if memory is None else memory.shape[1],
        requires.behaviour,
    )
    ring = TrajectoryRing(SharedMemoryFile(settings.ring), shape, settings.queue)
    seed = derive_seed(settings.seed, f"actor {settings.incarnation}", settings.first_simulator)
    source = RolloutSource(
        [simulators], actor_agent.agent, requires.steps, seed, behaviour=requires.behaviour
    )

    def beat(played: int) -> bool:
        ring.beat()
        return False

    source.alive = beat
    restarts_before = ring.restarts  # in former processes of this actor
    while True:
        ring.wait_for_room()
        actor_agent.refresh()
        batch = next(source)
        for _, message in source.events():  # simulators that were replaced
            print(message, file=sys.stderr, flush=True)
        ring.set_restarts(restarts_before + source.fields().get("simulator_restarts", 0))
        ring.put(batch.data, batch.episodes, actor_agent.version)


def main() -> None:
    """Entry point of the actor process."""
    run_actor(make_trajectories)


if __name__ == "__main__":
    main()
