"""TF-Replicator (Buchlovsky et al. 2019), Table 2: weak scaling of ResNet-50 under all-reduce, simulated from
costs measured on this machine. After an interruption, the same command continues."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from murmurate.bench import _simulated, _simulated_images
from murmurate.bench._cache import cached_value
from murmurate.bench._result import Log
from murmurate.bench._simulated_images import GlooRate, NetCosts
from murmurate.ranges import PositiveFloat, PositiveInt
from murmurate.simulation.cluster import Cluster
from murmurate.strategies import strategy
from murmurate.workloads.image_classifier import Net

NAME = "replicator-scaling"
SUMMARY = "weak scaling of ResNet-50 to 128 simulated members, from measured steps and gloo's rate, resumable"

# number of GPUs -> minutes for 90 passes (V100, 64 images each; section 5.1 and Table 2)
PAPER = {1: 7118.0, 8: 1049.0, 32: 330.0, 64: 182.0}


@dataclasses.dataclass(frozen=True)
class ScalingPlan:
    """Each member trains ``net`` on ``batch`` images of ``side`` x ``side`` pixels a step.

    measured_steps: number of steps whose CPU seconds are measured here; the simulated members' steps take as
    long. slower: number that multiplies these times (below 1: a faster processor). gloo_rounds: number of
    all-reduces between two processes here, which give the network's latency and bandwidth. network: a network
    in place of the measured one, as in ``murmurate simulate --network``. steps: number of steps of each
    member, between a start and an end that are left out.

    net: the net that learns. side: side of its images, in pixels. batch: number of images in a member's step.
    members: the numbers of members that are simulated. strategies: the strategies that are run. where: the
    folder that keeps the results.
    """

    net: Net = "resnet50"
    side: PositiveInt = 224
    batch: PositiveInt = 4
    measured_steps: PositiveInt = 5
    slower: PositiveFloat = 1.0
    gloo_rounds: PositiveInt = 5
    network: str = ""
    members: tuple[PositiveInt, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    steps: PositiveInt = 20
    strategies: tuple[str, ...] = ("all-reduce", "local-sgd", "pull-gossip")
    where: str = "runs/replicator-scaling"


QUICK = ScalingPlan()
FULL = ScalingPlan(batch=16, measured_steps=20, gloo_rounds=20, steps=100)


def measure(plan: ScalingPlan, log: Log) -> dict[str, Any]:
    """``images_per_second`` of all members, ``speed_up`` over one of them and ``efficiency`` (the speed-up
    over the number of members), beside the paper's. Messages take as long as if they had the parameters of
    ``net``. A figure has the speed-ups. What was measured or simulated before on this machine, in the folder
    ``where``, is not done again."""
    _simulated.refuse_unknown(plan.network, plan.strategies)
    costs, rate = measured(plan)
    costs = dataclasses.replace(costs, seconds=tuple(plan.slower * s for s in costs.seconds))
    log(f"{plan.net}: {costs.mean_seconds:.3f} s a step of {plan.batch} images")
    network = plan.network or rate.network
    log(f"gloo: {rate.bytes_per_second / 1e9:.2f} GB/s, {rate.latency_seconds * 1e6:.0f} us; {network}")
    rows = [row for name in plan.strategies for row in scaling(name, costs, network, plan, log)]
    figure = Path(plan.where) / "scaling.png"
    draw(rows, figure)
    return {
        "step_seconds": costs.mean_seconds,
        "parameters": costs.parameters,
        "gloo_bytes_per_second": rate.bytes_per_second,
        "gloo_latency_seconds": rate.latency_seconds,
        "network": network,
        "rows": rows,
        "verdict": verdict(rows),
        "figure": str(figure),
        "paper": "TF-Replicator, Table 2 (V100 GPUs, 64 images each); its minutes were not measured here",
    }


def measured(plan: ScalingPlan) -> tuple[NetCosts, GlooRate]:
    """The costs of a step and of gloo's all-reduce here, each measured once."""
    where = Path(plan.where)

    def costs() -> dict[str, Any]:
        net = _simulated_images.net_costs(plan.net, plan.side, 1000, plan.batch, plan.measured_steps)
        return dataclasses.asdict(net)

    key = [plan.net, plan.side, plan.batch, plan.measured_steps]
    found = cached_value(where, "costs", key, costs)
    net = NetCosts(tuple(found["seconds"]), found["parameters"])

    def rate() -> dict[str, Any]:
        return dataclasses.asdict(_simulated_images.gloo_rate(net.parameters, plan.gloo_rounds))

    return net, GlooRate(**cached_value(where, "gloo", [net.parameters, plan.gloo_rounds], rate))


def scaling(name: str, costs: NetCosts, network: str, plan: ScalingPlan, log: Log) -> list[dict[str, Any]]:
    """A row for each number of members under one strategy."""
    alone = plan.batch / costs.mean_seconds
    rows = []
    for members in plan.members:
        seconds = costs.mean_seconds
        if members > 1:
            key = [name, members, dataclasses.asdict(costs), network, plan.steps]
            compute = functools.partial(update_seconds, name, members, costs, network, plan)
            seconds = cached_value(Path(plan.where), f"{name} {members}", key, compute)
        speed = members * plan.batch / seconds
        paper = PAPER[1] / PAPER[members] if members in PAPER else None
        rows.append(
            {
                "strategy": name,
                "members": members,
                "update_seconds": seconds,
                "images_per_second": speed,
                "speed_up": speed / alone,
                "efficiency": speed / alone / members,
                "paper_speed_up": paper if name == "all-reduce" else None,
            }
        )
        log(f"{name}, {members} members: {speed / alone:.1f} times one")
    return rows


def update_seconds(name: str, members: int, costs: NetCosts, network: str, plan: ScalingPlan) -> float:
    """Virtual seconds of an update; an agent of a few parameters learns in place of the net."""
    seconds = []
    for steps in (plan.steps, 2 * plan.steps):  # their difference leaves out the start and the end
        run = _simulated.small(strategy(name)(), members, updates=steps)
        scaled = _simulated_images.network_for(network, _simulated.parameters(run), costs)
        with tempfile.TemporaryDirectory(prefix="murmurate-scaling-") as folder:
            compute = _simulated_images.compute_file(costs, Path(folder))
            summary, _ = _simulated.simulated(run, Cluster(compute=compute, network=scaled))
        seconds.append(float(summary["virtual_seconds"]))
    return (seconds[1] - seconds[0]) / plan.steps


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the speed-up over one member by number of members: a line for each strategy, the paper's points,
    and the number of members itself."""
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["strategy"] for row in rows):
        own = [row for row in rows if row["strategy"] == name]
        axes.plot([row["members"] for row in own], [row["speed_up"] for row in own], marker=".", label=name)
    paper = [PAPER[1] / minutes for minutes in PAPER.values()]
    axes.plot(list(PAPER), paper, "kx", label="paper (V100 GPUs)")
    members = sorted({row["members"] for row in rows})
    axes.plot(members, members, "k:", linewidth=1, label="number of members")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("members (simulated)")
    axes.set_ylabel("speed-up over one member")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def verdict(rows: list[dict[str, Any]]) -> str:
    """All-reduce against the paper's own scaling, in a sentence."""
    ours = {row["members"]: row for row in rows if row["strategy"] == "all-reduce"}
    common = [n for n in PAPER if n > 1 and n in ours]
    if not common:
        return "no number of members that the paper has was simulated under all-reduce"
    texts = [f"{ours[n]['speed_up']:.1f} (paper {PAPER[1] / PAPER[n]:.1f}) with {n} members" for n in common]
    return "speed-up of all-reduce over one member: " + ", ".join(texts)
