"""An actor: a process that plays with the newest parameters it can get, and sends its steps to its learner.

Ape-X (Horgan et al. 2018, Algorithm 1): each simulator has its own chance of exploring, and what a step is
first drawn by is computed here, from values that acting needs anyway. Started by ``Acted``, which says over
stdin what to do; an actor ends with its learner.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from murmurate.agents.interface import Agent, AgentConfig
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.replica.vector import Replica
from murmurate.sources.steps import steps_of
from murmurate.spec import derive_generator, derive_seed, native_bfloat16
from murmurate.worlds.interface import Simulators, World
from murmurate.worlds.spaces import Pauses, Record, Ring, Weights, give_way


@dataclass(frozen=True)
class Orders:
    """What an actor is told. Its simulators are number ``first`` and on of the ``total`` of all replicas'
    actors; ``low`` is the number of the first among its learner's.

    life: a name for this beginning of it; every life plays other games.
    """

    world: World
    agent: AgentConfig
    simulators: int
    low: int
    first: int
    total: int
    seed: int
    life: str
    weights: tuple[int, int]  # descriptor, and how many parameters
    ring: int


class Acting:
    """The loop. ``left``: whether it is to end."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self._groups: Simulators = orders.world.open(orders.simulators, training=True, first=orders.low)
        spec = self._groups.spec
        config: Any = orders.agent
        if getattr(config, "precision", None) == "bfloat16" and not native_bfloat16(torch.device("cpu")):
            config = dataclasses.replace(
                config, precision="float32"
            )  # the learner's device has it, we do not
        self._agent: Agent = config.build(spec, Replica, seed=orders.seed, device=torch.device("cpu"))
        self._agent.seat(orders.first, orders.total)
        descriptor, count = orders.weights
        self._weights = Weights(SharedMemoryFile(descriptor), count)
        self._ring = Ring(SharedMemoryFile(orders.ring), spec, orders.simulators)
        self._generator = derive_generator(orders.seed, f"actions {orders.life}", orders.first)
        self._version = 0
        self._pauses = Pauses()

    def go(self) -> None:
        orders = self.orders
        step = self._groups.reset(derive_seed(orders.seed, f"games {orders.life}"))
        memory = self._agent.initial_memory(orders.simulators)
        first = torch.ones(orders.simulators, dtype=torch.bool)
        held: Record | None = None
        while True:
            self._refresh()
            seen = step.observation
            action = self._agent.act(seen, memory, first, self._generator)
            memory, version = action.memory, self._version
            if held is not None:  # what followed its step has a value only now
                self._send(held, action.best)
            self._groups.send(action.action)
            step = self._groups.receive()
            first = step.terminated | step.truncated
            taken = steps_of(seen, action.action, step)._replace(taken=action.taken)
            held = Record(taken, list(step.episodes), version)

    def _send(self, record: Record, best: Tensor | None) -> None:
        steps = record.steps
        if steps.taken is None or best is None:
            steps = steps._replace(taken=None, following=None)
        else:
            if steps.truncated.any():  # what followed was another game
                best = best.clone()
                best[steps.truncated] = self._value(steps.next_observation[steps.truncated])
            steps = steps._replace(following=best)
        while not self._ring.has_room:
            self._pauses.sleep()
        self._pauses.over()
        self._ring.put(Record(steps, record.episodes, record.version))

    def _value(self, observation: Tensor) -> Tensor:
        none = torch.zeros(len(observation), dtype=torch.bool)
        best = self._agent.act(observation, None, none, self._generator, greedy=True).best
        return torch.zeros(len(observation)) if best is None else best

    def _refresh(self) -> None:
        """Take the newest parameters, if there are newer ones; wait for the first."""
        pauses = Pauses()
        while self._weights.version == 0:
            pauses.sleep()
        if self._weights.version == self._version:
            return
        replicas = list(self._agent.replicas.values())
        vector = torch.empty(sum(len(replica) for replica in replicas))
        self._version = self._weights.read(vector)
        with torch.no_grad():
            for replica, part in zip(replicas, torch.split(vector, [len(r) for r in replicas]), strict=True):
                replica.params.copy_(part)
                replica.reload()
                replica.clock = self._version - 1  # versions begin at 1, updates at 0


def _leave_with(learner: BinaryIO) -> None:
    learner.read()  # until its end is closed, however the learner ends
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    orders: Orders = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_leave_with, args=(sys.stdin.buffer,), daemon=True).start()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    give_way()
    Acting(orders).go()


if __name__ == "__main__":
    main()
