"""Jin 2018, Figures 3.1 and 3.2: all-reduce, elastic averaging and gossip, by number of members.

8 to 128 members are simulated: a small net learns from real images. Its messages take as long as those of
ResNet-18, and its steps a tenth (``faster``) of the time that steps of ResNet-18 take on this machine. Two
members are also real processes, whose steps take their own time. After an interruption, the same command
continues.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from murmurate.bench import _resumable, _simulated, _simulated_images
from murmurate.bench._cache import cached_value
from murmurate.bench._jin_figure import TrainingCurve, draw
from murmurate.bench._result import Log, mean
from murmurate.bench._resumable import ResumableRun
from murmurate.bench._simulated_images import NetCosts
from murmurate.errors import Refusal, RunFailed, unknown
from murmurate.ranges import PositiveFloat, PositiveInt, UnitInterval
from murmurate.recipes import recipe
from murmurate.record.reader import Record, read_metrics
from murmurate.simulation.cluster import Cluster
from murmurate.strategies import strategies
from murmurate.strategies.interface import Strategy
from murmurate.training.run import Run
from murmurate.workloads.image_classifier import ImageClassifier, Net

NAME = "jin-imagenet"
SUMMARY = (
    "gossip, elastic averaging, all-reduce on images, 8 to 128 simulated members, resumable; --full: 3 seeds"
)

# method -> strategy and its options (section 3.4: elastic with beta = 0.8 / p, gossip at every iteration)
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "all-reduce": ("all-reduce", {}),
    "elastic": ("elastic", {"period": 10}),
    "push-gossip": ("push-gossip", {"period": 1}),
    "pull-gossip": ("pull-gossip", {"period": 1}),
}
_MILESTONES = (1 / 3, 2 / 3)  # shares of a run after which its step size falls to a tenth
# fields of the plan on which a run's curve depends
_RUN_FIELDS = (
    "world", "path", "net", "width", "passes", "learning_rate", "validation", "costs_of", "costs_side",
    "measured_steps", "faster", "network", "points",
)  # fmt: skip
CLAIM = (
    "Jin 2018, sections 3.1 and 3.4: asynchronous methods lead at large step sizes up to about 32 members, "
    "and all-reduce ends at the lowest loss; not measured here"
)


@dataclasses.dataclass(frozen=True)
class JinImagesPlan:
    """Every method is trained once for each number of members and seed, for equally many passes.

    world: fashion or cifar10. path: path of the world's files. net: the net that learns. width: width of the
    net that learns. passes: number of passes through the training images; after 1/3 and 2/3 of them the step
    size falls to a tenth. batches: number of images in a member's step, for each of ``members``.
    learning_rate: learning rate of every member. costs_of: a larger net; simulated messages take as long as
    those of this net, and simulated steps its measured times divided by ``faster``. costs_side: side of the
    images of ``costs_of`` in pixels. measured_steps: number of steps of ``costs_of`` that are timed here.
    faster: number by which the measured times are divided (section 3.4: a K80 made a step of 32 images in
    about 0.2 s). network: as in ``murmurate simulate``. real_members: the numbers of members that are also
    real processes of this host. where: the folder that keeps the results.

    members: the numbers of members that are simulated. methods: the methods that are run. seeds: number of
    seeds (0, 1, ...). validation: share of the training images that is held out. points: number of points of
    each curve.
    """

    world: str = "fashion"
    path: str = ""
    net: Net = "resnet20"
    width: PositiveInt = 4
    passes: PositiveInt = 6
    members: tuple[PositiveInt, ...] = (8, 16, 32, 64, 128)
    batches: tuple[PositiveInt, ...] = (32, 16, 16, 16, 16)
    methods: tuple[str, ...] = tuple(METHODS)
    seeds: PositiveInt = 3
    learning_rate: PositiveFloat = 0.1
    validation: UnitInterval = 0.02
    costs_of: Net = "resnet18"
    costs_side: PositiveInt = 224
    measured_steps: PositiveInt = 10
    faster: PositiveFloat = 10.0
    network: str = "latency=2e-6,bandwidth=7e9"
    real_members: tuple[PositiveInt, ...] = (2,)
    points: PositiveInt = 30
    where: str = "runs/jin-imagenet"


QUICK = JinImagesPlan(
    passes=1,
    members=(8,),
    batches=(32,),
    seeds=1,
    measured_steps=2,
    real_members=(),
    where="runs/jin-images-quick",
)
FULL = JinImagesPlan()


def measure(plan: JinImagesPlan, log: Log) -> dict[str, Any]:
    """Loss against virtual time and against passes, and of real processes against wall time: ``rows``, and
    ``real`` of the processes, have the validation loss at the time until which all methods take large steps,
    and the test loss at the end of the run, means over the ``seeds`` runs that did not diverge; None if all
    did. Real runs that diverged are left out. A figure has the curves. Raises RunFailed if all runs diverged.
    """
    check(plan)
    where = Path(plan.where)
    where.mkdir(parents=True, exist_ok=True)
    curves = [
        curve
        for seed in range(plan.seeds)
        for members, batch in zip(plan.members, plan.batches, strict=True)
        for curve in simulated(plan, members, batch, seed, log)
    ]
    if not curves:
        raise RunFailed("all simulated runs diverged. Use a smaller --learning-rate.")
    rows = [row(members, method, curves) for members, method in itertools.product(plan.members, plan.methods)]
    found = [real(plan, *each, log) for each in itertools.product(plan.real_members, plan.methods)]
    processes = [each for each in found if each is not None]
    real_curves = [curve for curve, _ in processes]
    real_rows = [
        row(curve.members, curve.method, real_curves) | {"staleness_max": staleness}
        for curve, staleness in processes
    ]
    figure = where / "curves.png"
    draw([*curves, *real_curves], figure)
    return {
        "rows": rows,
        "verdict": [*verdict(rows), *verdict(real_rows, "processes")],
        "figure": str(figure),
        "real": real_rows,
        "paper": CLAIM,
    }


def check(plan: JinImagesPlan) -> None:
    """Raises Refusal for unknown methods, an invalid network, and unless there is a batch for each number of
    members."""
    _simulated.refuse_unknown(plan.network)
    for method in plan.methods:
        if method not in METHODS:
            raise unknown("method of this bench", method, METHODS)
    if len(plan.members) != len(plan.batches):
        raise Refusal(
            f"there are {len(plan.batches)} batches for {len(plan.members)} numbers of members. Give one "
            "batch for each, for example --members 8,16 --batches 32,16."
        )


def simulated(plan: JinImagesPlan, members: int, batch: int, seed: int, log: Log) -> list[TrainingCurve]:
    """The curves of all methods with so many members that did not diverge, each of which is computed once."""
    where = Path(plan.where)
    key = [plan.costs_of, plan.costs_side, batch, plan.measured_steps]

    def costs() -> dict[str, Any]:
        net = _simulated_images.net_costs(plan.costs_of, plan.costs_side, 1000, batch, plan.measured_steps)
        return dataclasses.asdict(net)

    measured = cached_value(where, "costs", key, costs)
    step = NetCosts(tuple(s / plan.faster for s in measured["seconds"]), measured["parameters"])
    curves = []
    for method in plan.methods:
        run = planned(plan, method, members, batch, seed)
        name = f"{method} {members} seed {seed}"
        fields = dataclasses.asdict(plan)
        run_fields = [fields[key] for key in _RUN_FIELDS]
        compute = functools.partial(learn, plan, run, step)
        points = cached_value(where, name, [run_fields, method, members, batch, seed], compute)
        if not points:
            log(f"{name}: diverged")
            continue
        curves.append(TrainingCurve(method, members, seed, points))
        last = points[-1]
        log(f"{name}: loss {last['loss']:.3f}, accuracy {last['accuracy']:.4f} after {last['seconds']:.0f} s")
    return curves


def planned(plan: JinImagesPlan, method: str, members: int, batch: int, seed: int) -> Run:
    base = recipe(f"{plan.world}-{plan.net}")
    world = dataclasses.replace(cast(Any, base.world), path=plan.path, validation=plan.validation)
    images = world.spec().examples
    updates = max(1, plan.passes * images // (members * batch))
    learner = dataclasses.replace(
        cast(ImageClassifier, base.learner),
        width=plan.width,
        batch=batch,
        learning_rate=plan.learning_rate,
        rate_batch=0,
        schedule="step",
        milestones=_MILESTONES,
        warmup=0.0,
        weight_decay=1e-4,
        precision="float32",
        validate_every=max(1, updates // plan.points),
    )
    name, options = METHODS[method]
    strategy: Strategy = strategies()[name](**options)
    return dataclasses.replace(
        base, world=world, learner=learner, strategy=strategy, replicas=members, env_steps=None,
        updates=updates, seed=seed, probe_every_updates=0,
    )  # fmt: skip


def learn(plan: JinImagesPlan, run: Run, step: NetCosts) -> list[dict[str, float]]:
    """Simulate the run; returns the points of its curve, of which the last is of the consensus parameters on
    the test images; none if it diverged."""
    network = _simulated_images.network_for(plan.network, _simulated.parameters(run), step)
    with tempfile.TemporaryDirectory(prefix="murmurate-jin-") as folder:
        compute = _simulated_images.compute_file(step, Path(folder))
        cluster = Cluster(compute=compute, network=network, lines=plan.points)
        summary, records = _simulated.simulated(run, cluster, may_diverge=True)
    if _resumable.diverged(summary):
        return []
    return points_of(run, records, summary, summary["virtual_seconds"])


def points_of(
    run: Run, records: Sequence[Record], summary: Mapping[str, Any], seconds: float
) -> list[dict[str, float]]:
    """The points of a curve, from a run's records and its summary. seconds: how long the run took."""
    images = run.world.spec().examples
    points = [
        {
            "seconds": record["time_seconds"],
            "passes": record["total_env_steps"] / images,
            "loss": record["validation_loss"],
            "accuracy": record["accuracy"],
        }
        for record in records
        if record["replica"] == 0 and record.get("validation_loss") is not None
    ]
    end = {
        "seconds": seconds,
        "passes": summary["env_steps"] / images,
        "loss": summary["test_loss"],
        "accuracy": summary["accuracy"],
    }
    return [*points, end]


def row(members: int, method: str, curves: Sequence[TrainingCurve]) -> dict[str, Any]:
    """Means over the seeds that have a curve, None without any; ``early_loss``: the last validation loss
    before the step size of any method falls."""
    matching = [c for c in curves if (c.members, c.method) == (members, method)]
    early = []
    for curve in matching:
        compared = [c for c in curves if (c.members, c.seed) == (members, curve.seed)]
        early.append(curve.loss_at(min(c.seconds_at(_MILESTONES[0]) for c in compared)))
    losses = [curve.points[-1]["loss"] for curve in matching]
    return {
        "members": members,
        "method": method,
        "seeds": len(matching),
        "seconds": mean([curve.points[-1]["seconds"] for curve in matching]),
        "early_loss": mean(early),
        "test_loss": mean(losses),
        "test_losses": losses,
        "accuracies": [curve.points[-1]["accuracy"] for curve in matching],
    }


def verdict(rows: Sequence[dict[str, Any]], kind: str = "members") -> list[str]:
    """For each number of members, which methods diverged with every seed, whether gossip leads early, and
    whether all-reduce ends lowest. kind: what the members are called."""
    sentences = []
    for members in dict.fromkeys(row["members"] for row in rows):
        by_method = {row["method"]: row for row in rows if row["members"] == members}
        if lost := [method for method, row in by_method.items() if row["test_loss"] is None]:
            sentences.append(f"{members} {kind}: {', '.join(lost)} diverged with every seed")
        by_method = {method: row for method, row in by_method.items() if method not in lost}
        gossip = [by_method[name] for name in ("push-gossip", "pull-gossip") if name in by_method]
        if "all-reduce" not in by_method or not gossip:
            continue
        reference = by_method["all-reduce"]
        best = min(gossip, key=lambda row: float(row["early_loss"]))
        behind = [row["method"] for row in gossip if row["early_loss"] >= reference["early_loss"]]
        who = "gossip" if len(behind) in (0, len(gossip)) else best["method"]  # never one that is behind
        lowest = min(by_method.values(), key=lambda row: float(row["test_loss"]))
        sentences.append(
            f"{members} {kind}: {who} {'does not lead' if best['method'] in behind else 'leads'} while the "
            f"step is large (validation loss {best['early_loss']:.3f}, all-reduce "
            f"{reference['early_loss']:.3f}); {lowest['method']} ends lowest "
            f"(test loss {lowest['test_loss']:.3f}, all-reduce {reference['test_loss']:.3f})"
        )
    return sentences


def real(plan: JinImagesPlan, members: int, method: str, log: Log) -> tuple[TrainingCurve, int] | None:
    """A method between processes of this host, with seed 0: its curve by wall time, and the greatest
    staleness; None if it diverged."""
    run = planned(plan, method, members, plan.batches[0], 0)
    learner = cast(ImageClassifier, run.learner)
    images = plan.passes * run.world.spec().examples
    _, options = METHODS[method]
    settings = (
        *(("--world.path", plan.path) if plan.path else ()),
        "--world.validation", str(plan.validation),
        "--strategy", run.strategy.name,
        *itertools.chain.from_iterable((f"--strategy.{key}", str(value)) for key, value in options.items()),
        "--replicas", str(members),
        "--agent.width", str(plan.width),
        "--agent.batch", str(learner.batch),
        "--agent.learning-rate", str(plan.learning_rate),
        "--agent.rate-batch", "0",
        "--agent.schedule", learner.schedule,
        "--agent.milestones", ",".join(map(str, _MILESTONES)),
        "--agent.warmup", "0",
        "--agent.weight-decay", "1e-4",
        "--agent.precision", learner.precision,
        "--agent.validate-every", str(learner.validate_every),
    )  # fmt: skip
    folder = Path(plan.where) / f"real-{method}-{members}-{plan.width}-to-{images}"
    resumable = ResumableRun(run.recipe, settings, 0, (images,), folder, f"{method}, real", unit="images")
    summary = _resumable.train(resumable, log)[images]
    if _resumable.diverged(summary):
        return None
    records = [record for record in read_metrics(folder / "metrics.jsonl") if "kind" not in record]
    points = points_of(run, records, summary, summary["wall_seconds"])
    return TrainingCurve(method, members, 0, points, real=True), summary["staleness_max"]
