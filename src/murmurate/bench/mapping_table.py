"""Zhang's Fig. 4.9 to 4.11 and Table 4.3 with this machine's devices: where learner, replay manager and data
storage of three agents belong, by batch size."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from murmurate.agents.ddpg import DDPG
from murmurate.agents.dqn import DQN
from murmurate.bench._result import Log
from murmurate.fpga.model import ReplayManagerModel
from murmurate.fpga.shape import TreeShape
from murmurate.mapping.assignment import HOST, Device, assign
from murmurate.mapping.lines import Line, fit
from murmurate.mapping.profile import Link, RecipeCosts
from murmurate.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from murmurate.replay.interface import Sample
from murmurate.replay.sum_tree import sum_tree
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec

NAME = "mapping-table"
SUMMARY = "where learner, replay manager and storage belong, by Zhang's method; CPU measured, FPGA modelled"

# case -> spec of its world, agent, batch sizes
_CASES: dict[str, tuple[EnvSpec, Any, tuple[int, ...]]] = {
    "CartPole": (EnvSpec("CartPole", (4,), torch.float32, 0, (1,)), DDPG(hidden=8), (32, 256, 2048, 16384)),
    "Hopper": (EnvSpec("Hopper", (11,), torch.float32, 0, (3,)), DDPG(hidden=256), (32, 256, 2048, 16384)),
    "Pong": (EnvSpec("Pong", (4, 84, 84), torch.uint8, 6, stacked=True), DQN(), (32, 64, 256)),
}


@dataclasses.dataclass(frozen=True)
class MappingTablePlan:
    """leaves: number of leaves of the replay's tree, a power of two from 4096 to 65536 (the FPGA's table has
    clocks for these). actors: number of actors, as in the thesis. link_seconds: assumed latency between host
    and FPGA. link_bytes_per_second: assumed bandwidth between host and FPGA. repetitions: number of
    repetitions of each time that is measured."""

    leaves: PositiveInt = 65_536
    actors: PositiveInt = 16
    link_seconds: NonNegativeFloat = 5e-6
    link_bytes_per_second: PositiveFloat = 2e9
    repetitions: PositiveInt = 5


QUICK, FULL = MappingTablePlan(repetitions=3), MappingTablePlan(repetitions=15)


def measure(plan: MappingTablePlan, log: Log) -> dict[str, Any]:
    """``train_seconds``: duration of a gradient step on this CPU, by case and batch (Fig. 4.9).
    ``replay_seconds``: duration of drawing a batch and of setting its priorities: on the CPU by lines fitted
    to measured times, on the FPGA by its model (Fig. 4.10). ``cells``: the chosen devices, with gradient
    steps per second, by fitted lines, of every pair of devices (Fig. 4.11, Table 4.3). ``search_seconds``:
    time in which the devices of all cells were chosen.

    Raises Refusal for leaves outside the FPGA's table.
    """
    batches = sorted({batch for _, _, sizes in _CASES.values() for batch in sizes})
    model = ReplayManagerModel(TreeShape(plan.leaves, 4, 16))
    clock, provenance = model.clock  # refuses leaves outside its table, before anything is measured
    host_sample, host_update = _host_replay(plan, batches)
    fpga_sample = fit([(b, model.sample_seconds(b)) for b in batches])
    fpga_update = fit([(b, model.update_seconds(b)) for b in batches])
    link = Link(plan.link_seconds, plan.link_bytes_per_second, "assumed")
    fpga = Device("fpga", _costs(sample=fpga_sample, priority=fpga_update), link, how="model")
    train: dict[str, dict[int, float]] = {}
    devices: dict[str, list[Device]] = {}
    for name, (spec, config, sizes) in _CASES.items():
        train[name] = {batch: _train_seconds(spec, config, batch, plan.repetitions) for batch in sizes}
        log(f"{name}: " + ", ".join(f"{b}: {1e3 * s:.2f} ms" for b, s in train[name].items()))
        learner_line = fit(list(train[name].items()))
        # the whole step counts as its forward pass
        no_cost = Line(0.0, 0.0, (0.0, 0.0), (0.0, 0.0), (0, 0))
        host = _costs(
            sample=host_sample, priority=host_update, forward=learner_line, backward=no_cost, update=no_cost
        )
        devices[name] = [Device(HOST, host), fpga]
    began = time.perf_counter()
    cells = []
    for name, (spec, _, sizes) in _CASES.items():
        row_bytes = _row_bytes(spec)
        for batch in sizes:
            assignment = assign(devices[name], batch, row_bytes, plan.actors, plan.leaves)
            cells.append(
                {
                    "environment": name,
                    "batch": batch,
                    "learner": assignment.learner,
                    "replay_manager": assignment.replay,
                    "storage": assignment.storage,
                    "steps_per_second": assignment.steps_per_second,
                    "others": {f"{a}-{b}": rate for (a, b), rate in assignment.others.items()},
                    "why": assignment.why,
                }
            )
    return {
        "cells": cells,
        "search_seconds": time.perf_counter() - began,
        "train_seconds": {name: {str(b): s for b, s in row.items()} for name, row in train.items()},
        "replay_seconds": {
            str(b): {
                "cpu_sample": host_sample.seconds(b),
                "cpu_update": host_update.seconds(b),
                "fpga_sample": model.sample_seconds(b),
                "fpga_update": model.update_seconds(b),
            }
            for b in batches
        },
        "fpga_clock": {"mhz": clock / 1e6, "how": provenance},
        "link": dataclasses.asdict(link),
        "devices": {"cpu": "measured", "fpga": "replay manager by model; no learner", "gpu": "not here"},
    }


def _costs(**lines: Line) -> RecipeCosts:
    return RecipeCosts(lines, dict.fromkeys(lines, 1.0), 0.0, 0)


def _row_bytes(spec: EnvSpec) -> float:
    """E, the bytes of a transition in the storage, which keeps each image once."""
    if spec.stacked:
        return float(spec.observation_shape[1] * spec.observation_shape[2] + 16)
    return 4.0 * (2 * spec.observation_shape[0] + max(1, sum(spec.action_shape)) + 2)


def _host_replay(plan: MappingTablePlan, batches: Sequence[int]) -> tuple[Line, Line]:
    """Costs of drawing a batch, and of setting its priorities, on this CPU. As on the modelled FPGA, random
    numbers and priorities are given, and importance weights are left out."""
    tree = sum_tree(plan.leaves, seed=0)
    generator = torch.Generator().manual_seed(0)
    tree.set(torch.arange(plan.leaves), torch.rand(plan.leaves, generator=generator))
    draws, updates = [], []
    for batch in batches:
        uniform = torch.rand(8, batch, generator=generator, dtype=torch.float64)
        masses = itertools.cycle((tree.total * uniform).unbind())
        index = torch.randint(plan.leaves, (batch,), generator=generator)
        priority = torch.rand(batch, generator=generator)
        draws += [(batch, s) for s in _times(lambda: tree.find(next(masses)), plan.repetitions)]  # noqa: B023
        updates += [(batch, s) for s in _times(lambda: tree.set(index, priority), plan.repetitions)]  # noqa: B023
    return fit(draws), fit(updates)


def _times(call: Callable[[], Any], repetitions: int) -> list[float]:
    """Seconds of a call: ``repetitions`` medians of five calls each."""
    for _ in range(3):
        call()
    times = []
    for _ in range(5 * repetitions):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return [statistics.median(times[5 * i : 5 * i + 5]) for i in range(repetitions)]


def _train_seconds(spec: EnvSpec, config: Any, batch: int, repetitions: int) -> float:
    """Median seconds of a gradient step on one thread, which leaves the other cores to the replay."""
    agent = dataclasses.replace(config, batch=batch).build(Context(spec, Replica, seed=0))
    generator = torch.Generator().manual_seed(0)

    def observation() -> torch.Tensor:
        if spec.images:
            return torch.randint(
                256, (batch, *spec.observation_shape), generator=generator, dtype=torch.uint8
            )
        return torch.randn(batch, *spec.observation_shape, generator=generator)

    action = (
        torch.randint(spec.actions, (batch,), generator=generator)
        if spec.actions
        else torch.rand(batch, *spec.action_shape, generator=generator)
    )
    sample = Sample(
        torch.arange(batch),
        torch.ones(batch),
        observation(),
        action,
        torch.randn(batch, generator=generator),
        torch.full((batch,), 0.99),
        observation(),
    )
    times, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(repetitions + 2):
            began = time.perf_counter()
            agent.learn(Batch(sample))
            if number >= 2:
                times.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(times)
