"""Zhang's Fig. 4.9 to 4.11 and Table 4.3 with this machine's devices and a modelled FPGA: where learner,
replay manager and data storage of three agents belong, by batch size."""

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
from murmurate.bench import _mapping_fpga
from murmurate.bench._mapping_fpga import FPGA
from murmurate.bench._result import Log
from murmurate.bench.replay_gpu import finish
from murmurate.errors import Refusal
from murmurate.mapping.assignment import HOST, Device, assign
from murmurate.mapping.lines import Line, fit
from murmurate.mapping.profile import Link, RecipeCosts
from murmurate.native.cores import usable_cores
from murmurate.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from murmurate.replay.interface import Sample
from murmurate.replay.sum_tree import sum_tree
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, EnvSpec

NAME = "mapping-table"
SUMMARY = (
    "where learner, replay manager and storage belong, by Zhang's method; CPU, GPU measured, FPGA modelled"
)

GPU = "gpu"
_HOST_DEVICE = torch.device("cpu")
_PARTS = ("learner", "replay_manager", "storage")
# case -> spec of its world, agent, batch sizes
_CASES: dict[str, tuple[EnvSpec, Any, tuple[int, ...]]] = {
    "CartPole": (EnvSpec("CartPole", (4,), torch.float32, 0, (1,)), DDPG(hidden=8), (32, 256, 2048, 16384)),
    "Hopper": (EnvSpec("Hopper", (11,), torch.float32, 0, (3,)), DDPG(hidden=256), (32, 256, 2048, 16384)),
    "Pong": (EnvSpec("Pong", (4, 84, 84), torch.uint8, 6, stacked=True), DQN(), (32, 64, 256)),
}
# Table 4.3: case, batch -> the devices of _PARTS
_THESIS = {
    **{("CartPole", batch): (FPGA, FPGA, FPGA) for batch in (32, 256, 2048, 16384)},
    ("Hopper", 32): (FPGA, FPGA, FPGA),
    ("Hopper", 256): (GPU, HOST, GPU),
    ("Hopper", 2048): (GPU, HOST, GPU),
    ("Hopper", 16384): (GPU, FPGA, GPU),
    ("Pong", 32): (GPU, HOST, GPU),
    ("Pong", 64): (GPU, HOST, GPU),
    ("Pong", 256): (GPU, HOST, HOST),
}
# threads of the replay on the CPU, as far as there are cores; Fig. 4.10 has these without 2
_THREADS = (1, 2, 4, 8, 16)
_MOST_LEARNER_THREADS = 16  # as in Fig. 4.9


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
    """``train_seconds``: duration of a gradient step, by case, device and batch (Fig. 4.9). On the CPU it has
    all cores but one, at most 16. ``replay_seconds``: duration of drawing a batch and of setting its
    priorities, by batch and device; "cpu-4": on four threads (Fig. 4.10). ``cells``: the chosen devices
    (Table 4.3) with those of the thesis, and gradient steps per second of every pair of devices (Fig. 4.11);
    the CPU's replay manager has one thread, as in the thesis. ``how``: whether what a device's times come
    from is measured, modelled or assumed. ``no_fpga_learner``: why there is no learner on the FPGA.
    ``search_seconds``: time in which the devices of all cells were chosen.

    Raises Refusal for leaves outside the FPGA's table.
    """
    batches = sorted({batch for _, _, sizes in _CASES.values() for batch in sizes})
    fpga = _mapping_fpga.FpgaModel(plan.leaves)  # refuses what is not in its table, before measuring
    gpu = _gpu()
    replay = {
        f"{HOST}-{threads}": _replay_seconds(plan, batches, _HOST_DEVICE, threads)
        for threads in _THREADS
        if threads <= usable_cores()
    }
    links = {FPGA: Link(plan.link_seconds, plan.link_bytes_per_second, "assumed")}
    if gpu is not None:
        replay[GPU] = _replay_seconds(plan, batches, gpu[0])
        links[GPU] = _measured_link(gpu[0], plan.repetitions)
    replay[FPGA] = fpga.replay_seconds(batches)
    train, fpga_room, refused = _gradient_steps(plan, fpga, None if gpu is None else gpu[0], log)
    began = time.perf_counter()
    cells = []
    for name, (spec, _, sizes) in _CASES.items():
        for batch in sizes:
            room = {HOST: float("inf"), GPU: gpu[1] if gpu else 0.0, FPGA: fpga_room[name, batch]}
            devices = [
                Device(
                    device,
                    _costs(seconds.get(batch), replay[f"{HOST}-1" if device == HOST else device][batch]),
                    links.get(device),
                    shares=device == GPU,
                    bytes=room[device],
                )
                for device, seconds in train[name].items()
            ]
            cells.append(_cell(name, batch, devices, _row_bytes(spec), plan, links))
    search_seconds = time.perf_counter() - began
    for cell in cells:
        choices = (f"{part} {cell[part]} ({cell['thesis'].get(part, '-')})" for part in _PARTS)
        log(f"{cell['environment']}, {cell['batch']}: {', '.join(choices)}; in brackets: the thesis")
    return {
        "cells": cells,
        "search_seconds": search_seconds,
        "train_seconds": {
            name: {device: {str(b): s for b, s in row.items()} for device, row in rows.items()}
            for name, rows in train.items()
        },
        "replay_seconds": {
            str(b): {
                device: dict(zip(("sample", "update"), row[b], strict=True)) for device, row in replay.items()
            }
            for b in batches
        },
        "no_fpga_learner": refused,
        "how": {
            "cpu": "measured",
            "gpu": "not measured: torch sees no CUDA device" if gpu is None else "measured",
            "fpga": f"modelled; clock of the replay manager {fpga.clock[1]}, of the learner assumed",
            **{f"link to {name}": link.how for name, link in links.items()},
        },
        "fpga_clock": {"mhz": fpga.clock[0] / 1e6, "how": fpga.clock[1]},
        "links": {name: dataclasses.asdict(link) for name, link in links.items()},
    }


def _gradient_steps(
    plan: MappingTablePlan, fpga: _mapping_fpga.FpgaModel, gpu: torch.device | None, log: Log
) -> tuple[dict[str, dict[str, dict[int, float]]], dict[tuple[str, int], float], dict[str, str]]:
    """(seconds of a gradient step by case, device and batch; bytes of the FPGA that are left for the storage,
    by case and batch; why there is no learner on the FPGA, by case and batch in words)."""
    train: dict[str, dict[str, dict[int, float]]] = {}
    fpga_room: dict[tuple[str, int], float] = {}
    refused: dict[str, str] = {}
    for name, (spec, config, sizes) in _CASES.items():
        train[name] = {HOST: {b: _train_seconds(spec, config, b, plan.repetitions) for b in sizes}}
        if gpu is not None:
            train[name][GPU] = {b: _train_seconds(spec, config, b, plan.repetitions, gpu) for b in sizes}
        train[name][FPGA] = {}
        for batch in sizes:
            try:
                train[name][FPGA][batch], fpga_room[name, batch] = fpga.train_seconds(spec, config, batch)
            except Refusal as refusal:
                refused[f"{name}, {batch}"], fpga_room[name, batch] = str(refusal), fpga.free_bytes
        for device, seconds in train[name].items():
            times = ", ".join(f"{b}: {1e3 * s:.2f} ms" for b, s in seconds.items())
            log(f"{name}, {device}: {times or 'no learner'}")
    return train, fpga_room, refused


def _cell(
    name: str,
    batch: int,
    devices: list[Device],
    row_bytes: float,
    plan: MappingTablePlan,
    links: dict[str, Link],
) -> dict[str, Any]:
    """The chosen devices and those of the thesis, with the rates of all pairs."""
    assignment = assign(devices, batch, row_bytes, plan.actors, plan.leaves)
    chosen = dict(zip(_PARTS, (assignment.learner, assignment.replay, assignment.storage), strict=True))
    printed = _THESIS.get((name, batch))
    thesis = dict(zip(_PARTS, printed, strict=True)) if printed else {}
    return {
        "environment": name,
        "batch": batch,
        **chosen,
        "steps_per_second": assignment.steps_per_second,
        "how": _how(assignment.learner, assignment.replay, links),
        "thesis": thesis,
        "differs_from_thesis": ", ".join(p for p in _PARTS if thesis and chosen[p] != thesis[p]) or "nowhere",
        "others": {f"{a}-{b}": rate for (a, b), rate in assignment.others.items()},
        "others_how": {f"{a}-{b}": _how(a, b, links) for a, b in assignment.others},
        "why": assignment.why,
    }


def _how(learner: str, replay: str, links: dict[str, Link]) -> str:
    """What the rate of a pair of devices comes from."""
    how = {
        "learner": "modelled, clock assumed" if learner == FPGA else "measured",
        "replay manager": "modelled" if replay == FPGA else "measured",
        **{f"link to {name}": link.how for name, link in links.items() if name in (learner, replay)},
    }
    if set(how.values()) == {"measured"}:
        return "measured"
    return "; ".join(f"{part} {known}" for part, known in how.items())


def _costs(train_seconds: float | None, replay_seconds: tuple[float, float]) -> RecipeCosts:
    """Costs that do not depend on the batch, for one batch. The whole step counts as its forward pass."""
    sample, priority = replay_seconds
    seconds = {"sample": sample, "priority": priority}
    if train_seconds is not None:
        seconds |= {"forward": train_seconds, "backward": 0.0, "update": 0.0}
    lines = {key: Line(s, 0.0, (s, 0.0), (s, 0.0), (0, 0)) for key, s in seconds.items()}
    return RecipeCosts(lines, dict.fromkeys(lines, 1.0), 0.0, 0)


def _row_bytes(spec: EnvSpec) -> float:
    """E, the bytes of a transition in the storage, which keeps each image once."""
    if spec.stacked:
        return float(spec.observation_shape[1] * spec.observation_shape[2] + 16)
    return 4.0 * (2 * spec.observation_shape[0] + max(1, sum(spec.action_shape)) + 2)


def _gpu() -> tuple[torch.device, float] | None:
    """torch's first GPU and the bytes of its memory that are free; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", 0)
    return device, float(torch.cuda.mem_get_info(device)[0])


def _measured_link(gpu: torch.device, repetitions: int) -> Link:
    """Latency and bandwidth of copies from the host's memory to the GPU."""
    times = []
    for size in (1 << 10, 1 << 24):
        here, there = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8, device=gpu)
        times += [(size, s) for s in _times(lambda: there.copy_(here), repetitions, gpu)]  # noqa: B023
    line = fit(times)
    return Link(line.a, 1 / line.b, "measured")


def _replay_seconds(
    plan: MappingTablePlan, batches: Sequence[int], device: torch.device, threads: int = 1
) -> dict[int, tuple[float, float]]:
    """By batch, seconds of drawing it, and of setting its priorities. As on the modelled FPGA, random numbers
    and priorities are given, on the device, and importance weights are left out."""
    tree = sum_tree(plan.leaves, seed=0, device=device, threads=threads)
    generator = torch.Generator().manual_seed(0)
    tree.set(torch.arange(plan.leaves), torch.rand(plan.leaves, generator=generator))
    seconds = {}
    for batch in batches:
        uniform = torch.rand(8, batch, generator=generator, dtype=torch.float64)
        masses = itertools.cycle((tree.total * uniform).to(device).unbind())
        index = torch.randint(plan.leaves, (batch,), generator=generator).to(device)
        priority = torch.rand(batch, generator=generator).to(device)
        draws = _times(lambda: tree.find(next(masses)), plan.repetitions, device)  # noqa: B023
        updates = _times(lambda: tree.set(index, priority), plan.repetitions, device)  # noqa: B023
        seconds[batch] = statistics.median(draws), statistics.median(updates)
    return seconds


def _times(call: Callable[[], Any], repetitions: int, device: torch.device) -> list[float]:
    """Seconds of a call: ``repetitions`` medians of five calls each."""
    for _ in range(3):
        call()
    times = []
    for _ in range(5 * repetitions):
        finish(device)
        began = time.perf_counter()
        call()
        finish(device)
        times.append(time.perf_counter() - began)
    return [statistics.median(times[5 * i : 5 * i + 5]) for i in range(repetitions)]


def _train_seconds(
    spec: EnvSpec, config: Any, batch: int, repetitions: int, device: torch.device = _HOST_DEVICE
) -> float:
    """Median seconds of a gradient step; the CPU leaves a core to the replay."""
    agent = dataclasses.replace(config, batch=batch).build(Context(spec, Replica, seed=0, device=device))
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
        torch.arange(batch, device=device),
        torch.ones(batch, device=device),
        observation().to(device),
        action.to(device),
        torch.randn(batch, generator=generator).to(device),
        torch.full((batch,), 0.99, device=device),
        observation().to(device),
    )
    times, threads = [], torch.get_num_threads()
    torch.set_num_threads(min(_MOST_LEARNER_THREADS, max(1, usable_cores() - 1)))
    try:
        for number in range(repetitions + 2):
            finish(device)
            began = time.perf_counter()
            agent.learn(Batch(sample))
            finish(device)
            if number >= 2:
                times.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(times)
