"""DPSVI's speed-up (Mohamad et al., eq. 12, Fig. 1 to 3), and its sparse pushes against dense ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from murmurate.bench import _simulated, _topic_costs, _topic_real
from murmurate.bench._cache import cached_value
from murmurate.bench._result import Log
from murmurate.bench._topic_costs import DPSVICosts
from murmurate.bench._topic_plan import FULL_PLAN, SpeedupPlan
from murmurate.bench._topic_runs import EvaluationSchedule, PerplexityPoint, evaluations, reached, validation
from murmurate.datasets.corpus_world import CorpusWorld
from murmurate.datasets.generated import generate
from murmurate.datasets.writing import write
from murmurate.recipes import recipe
from murmurate.replica.sparse import StepTooLarge
from murmurate.simulation.cluster import Cluster
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.dpsgd.step_sizes import scaled_rate
from murmurate.strategies.interface import Strategy
from murmurate.strategies.solo import Solo
from murmurate.training.run import Run
from murmurate.training.run_folder import plain
from murmurate.workloads.topic_model import TopicModel

NAME = "topics-speedup"
SUMMARY = "DPSVI's speed-up by workers, threads and B, real and simulated; its sparse pushes; --full: an hour"

QUICK, FULL = SpeedupPlan(), FULL_PLAN
_DEADLINE_SECONDS = 60.0


PAPER = {
    "linear_up_to_workers": 14,
    "linear_up_to_threads": 8,
    "slower_from_both": 6,
    "source": "Mohamad et al., section 4.1.1 to 4.1.3; Fig. 1 to 3 are drawn, not printed",
}
NOTE = (
    "Simulated threads have a core each: those of a real node contend for its memory's bandwidth. The "
    "worker's end of a message is charged what the master's was measured to cost."
)


@dataclasses.dataclass(frozen=True)
class SpeedupCase:
    """A point of Fig. 1 to 3 under a step rule. panel: the figure's group of points. batch: M."""

    panel: str
    rule: str
    workers: int
    threads: int
    local_updates: int
    batch: int

    @property
    def name(self) -> str:
        shape = f"nW={self.workers} p={self.threads} B={self.local_updates} M={self.batch}"
        return f"{self.rule} {shape}"


def measure(plan: SpeedupPlan, log: Log) -> dict[str, Any]:
    """TSP = T(SVI) / T(DPSVI) at equal perplexity of validation documents.

    There are two baselines T(SVI): ``serial`` is DPSVI's own rule at nW = p = B = M = 1, and ``svi`` is the
    paper's best (mini-batches of 1024, kappa 0.5, tau0 1), compared at the perplexity that ``serial`` has
    after half the documents. ``speedup`` is relative to the panel's first case, which has the fewest
    replicas, times its number of replicas (``largest``: relative to the first case of ``threads``). This must
    be what is linear in Fig. 1 to 3, because the step rule makes steps shorter as p, B or M grow. Times are
    known only to within one step of the master (a fold) and a factor ``look_factor`` of documents. Results
    below ``plan.where`` are reused, unless they are of another machine or other versions. Raises
    Refusal for an invalid network, and if the runs on real processes are too short for their target.
    """
    _simulated.refuse_unknown(plan.network)
    _topic_real.refuse_late_target(plan)
    where = Path(plan.where)
    where.mkdir(parents=True, exist_ok=True)
    world = _world(plan.vocabulary, plan.mean_length, plan.documents, plan)
    key = [world.path, plan.measured_updates, plan.pushes, plan.width_local_updates]
    cost = DPSVICosts(
        **cached_value(where, "costs", key, lambda: dataclasses.asdict(_costs(plan, world, log)))
    )
    svi = run_of(world, svi_model(plan), Solo(), 1)
    return {
        "costs": dataclasses.asdict(cost),
        "paper": PAPER,
        "said": NOTE,
        "real": _topic_real.real(plan, world, log) if plan.real_documents else None,
        "sparse": {"perplexity": sparse(plan, world, log), "push_bytes": widths(plan, log)},
        "rules": {rule: _rule(rule, world, svi, cost, plan, log) for rule in ("paper", "average")},
    }


# -- the runs -----------------------------------------------------------------------------------------


def _world(vocabulary: int, mean_length: float, documents: int, plan: SpeedupPlan) -> CorpusWorld:
    path = Path(plan.where) / f"corpus-{vocabulary}-{mean_length:g}-{documents}-{plan.topics}.npz"
    if not path.exists():
        write(generate(documents, vocabulary, plan.topics, mean_length).corpus, path, "npz")
    return CorpusWorld(path=str(path.resolve()), validation=plan.kept, test=0)


def run_of(world: CorpusWorld, model: TopicModel, strategy: Strategy, replicas: int) -> Run:
    base = replace(recipe("corpus-lda"), launcher="simulated")
    return replace(base, world=world, learner=model, strategy=strategy, replicas=replicas)


def svi_model(plan: SpeedupPlan) -> TopicModel:
    """The paper's baseline at its best (section 4.1)."""
    return TopicModel(topics=plan.topics, batch=1024, delay=1.0, forgetting=0.5, validate_every=0)


def model(plan: SpeedupPlan, rule: str) -> TopicModel:
    rate = 0.1 if rule == "paper" else plan.rate
    return TopicModel(topics=plan.topics, batch=64, step_rule="average", rate=rate, validate_every=0)


def dpsvi(
    plan: SpeedupPlan,
    world: CorpusWorld,
    case: SpeedupCase,
    shrinks: Literal["present", "pulled"] = "present",
) -> Run:
    """Nodes wait for the master's answer (Algorithm 2, line 3, follows line 10)."""
    strategy = DPSGD(
        threads=case.threads,
        local_updates=case.local_updates,
        batch=case.batch,
        global_learning_rate=0.1 if case.rule == "paper" else None,
        scale_rates=case.rule == "paper",
        wait=True,
        shrinks=shrinks,
        deadline_seconds=_DEADLINE_SECONDS,
    )
    return run_of(world, model(plan, case.rule), strategy, case.workers * case.threads)


def cases(plan: SpeedupPlan, rule: str) -> Iterator[SpeedupCase]:
    """Under ``average``, M is nW: as rho is 1 / nW, a larger M would move the master's v further than the
    nodes moved."""

    def batch(workers: int, M: int) -> int:
        return M if rule == "paper" else workers

    for B in plan.workers_local_updates:
        for n in plan.workers:
            yield SpeedupCase("workers", rule, n, 1, B, batch(n, plan.workers_batch))
    for p in plan.threads:
        yield SpeedupCase("threads", rule, 1, p, 15, batch(1, plan.batch))
    for B in plan.local_updates:
        for n in plan.both:
            yield SpeedupCase("both", rule, n, n, B, batch(n, plan.batch))
    if plan.largest is not None:
        workers, threads = plan.largest
        yield SpeedupCase("largest", rule, workers, threads, 15, batch(workers, plan.batch))


def _costs(plan: SpeedupPlan, world: CorpusWorld, log: Log) -> DPSVICosts:
    serial = run_of(world, model(plan, "paper"), Solo(), 1)
    svi = run_of(world, svi_model(plan), Solo(), 1)
    pushing = {
        B: dpsvi(plan, world, SpeedupCase("", "average", 1, 1, B, 1)) for B in plan.width_local_updates
    }
    return _topic_costs.costs(serial, svi, pushing, plan.measured_updates, plan.pushes, log)


# -- Fig. 1 to 3 ----------------------------------------------------------------------------------------


def cluster(seconds: float, cost: DPSVICosts, plan: SpeedupPlan) -> Cluster:
    network = f"{plan.network},handling={cost.message_seconds}"
    if cost.byte_seconds:
        network += f",handling-bandwidth={1 / cost.byte_seconds}"
    return Cluster(compute=f"lognormal:{seconds},{cost.step_spread}", network=network)


def _rule(
    rule: str, world: CorpusWorld, svi: Run, cost: DPSVICosts, plan: SpeedupPlan, log: Log
) -> dict[str, Any]:
    """All cases under one step rule."""
    documents = validation(world)

    def curve(name: str, run: Run, seconds: float, target: float, most: int) -> list[PerplexityPoint]:
        def compute() -> list[PerplexityPoint]:
            log(name)
            first = min(1_000, plan.target_documents)
            schedule = EvaluationSchedule(documents, first, plan.look_factor, most, target, folded=True)
            return evaluations(run, cluster(seconds, cost, plan), schedule)

        key = [plain(run), dataclasses.asdict(cost), target, most, plan.network, plan.look_factor]
        return [PerplexityPoint(*point) for point in cached_value(Path(plan.where), name, key, compute)]

    serial = run_of(world, model(plan, rule), Solo(), 1)
    if rule == "paper":  # with both eta and rho, so that the step is their product
        serial = dpsvi(plan, world, SpeedupCase("", rule, 1, 1, 1, 1))
    alone = curve(f"{rule} serial", serial, cost.step_seconds, 0.0, plan.target_documents)
    target = alone[-1].perplexity
    serial_at = reached(alone, target)
    # SVI's longer steps do not reach the target, so it has an easier one
    first_half = [point for point in alone if point.documents <= plan.target_documents // 2] or alone[:1]
    svi_target = first_half[-1].perplexity
    svi_at = reached(curve(f"{rule} svi", svi, cost.svi_step_seconds, svi_target, plan.most), svi_target)
    rows: list[dict[str, Any]] = []
    baselines: dict[tuple[str, int], tuple[SpeedupCase, PerplexityPoint | None]] = {}
    for case in cases(plan, rule):
        points = curve(case.name, dpsvi(plan, world, case), cost.step_seconds, target, plan.most)
        at = reached(points, target)
        # the largest is the only case of its panel: its baseline is the node of one thread
        group = ("threads" if case.panel == "largest" else case.panel, case.local_updates)
        baselines.setdefault(group, (case, at))
        tsp_svi = _speed_ratio(svi_at, reached(points, svi_target))
        rows.append(_row(case, at, serial_at, baselines[group]) | {"tsp_svi": tsp_svi})
    eta = 0.1 if rule == "paper" else plan.rate
    return {
        "target_perplexity": target,
        "target_perplexity_svi": svi_target,
        "serial": {
            "step": eta * eta if rule == "paper" else eta,
            "batch": 64,
            "reached": serial_at and serial_at._asdict(),
        },
        "svi": {"step": "(1 + t) ** -0.5", "batch": 1024, "reached": svi_at and svi_at._asdict()},
        "cases": rows,
    }


def _speed_ratio(other: PerplexityPoint | None, at: PerplexityPoint | None) -> float | None:
    """How many times as fast ``at`` was reached as ``other``; None if either was not reached."""
    return None if at is None or other is None else other.seconds / at.seconds


def _row(
    case: SpeedupCase,
    at: PerplexityPoint | None,
    serial: PerplexityPoint | None,
    baseline: tuple[SpeedupCase, PerplexityPoint | None],
) -> dict[str, Any]:
    """baseline: the panel's first case, to which the speed-up is relative."""
    p, B, M = case.threads, case.local_updates, case.batch
    ratio = _speed_ratio(baseline[1], at)
    return {
        **dataclasses.asdict(case),
        "eta_and_rho": scaled_rate(0.1, p, B, M) if case.rule == "paper" else None,
        "documents": None if at is None else at.documents,
        "folds": None if at is None else at.folds,
        "seconds": None if at is None else at.seconds,
        "tsp_serial": _speed_ratio(serial, at),
        "speedup": None if ratio is None else ratio * baseline[0].workers * baseline[0].threads,
        "documents_per_second": None if at is None else at.documents / at.seconds,
    }


# -- sparse pushes --------------------------------------------------------------------------------------


def sparse(plan: SpeedupPlan, world: CorpusWorld, log: Log) -> list[dict[str, Any]]:
    """Perplexities with pushes of rows and of whole vectors under the same schedule, 4 workers, M = 4.

    A dense push shrinks the master's v as it was pulled, perhaps several folds before: with long steps counts
    in v become negative and are read as 0. ``sparse`` shrinks the same v and refuses such steps (None);
    ``present`` shrinks the present v.
    """
    rows = []
    every = plan.sparse_documents // plan.sparse_looks
    for rate in plan.sparse_rates:
        for B in plan.sparse_local_updates:
            with_rate = replace(plan, rate=rate)
            case = SpeedupCase("", "average", 4, 1, B, 4)
            pulled, present = dpsvi(with_rate, world, case, "pulled"), dpsvi(with_rate, world, case)
            kinds = {"sparse": (pulled, False), "dense": (pulled, True), "present": (present, False)}
            curves = {
                kind: _push_curve(plan, world, *kinds[kind], every, f"{kind} pushes", log) for kind in kinds
            }
            rows.append(
                {
                    "local_updates": B,
                    "rate": rate,
                    "documents": every,
                    **curves,
                    "most_apart": _largest_difference(curves["sparse"], curves["dense"]),
                    "present_most_apart": _largest_difference(curves["present"], curves["dense"]),
                }
            )
    return rows


def _largest_difference(curve: list[float | None], other: list[float | None]) -> float | None:
    """The largest relative difference of two curves; None if one of them has gaps."""
    pairs = [(a, b) for a, b in zip(curve, other, strict=True) if a is not None and b is not None]
    return max(abs(a / b - 1) for a, b in pairs) if len(pairs) == len(curve) else None


def _push_curve(
    plan: SpeedupPlan, world: CorpusWorld, run: Run, dense: bool, every: int, name: str, log: Log
) -> list[float | None]:
    """The perplexity each time that ``every`` more documents are learned; None where it is not finite, and
    everywhere if a step was refused."""

    def compute() -> list[float | None]:
        log(name)
        schedule = EvaluationSchedule(validation(world), every, 1, every * plan.sparse_looks)
        any_cluster = Cluster(compute="lognormal:0.01,0.1", network="latency=1e-4")
        try:
            points = evaluations(run, any_cluster, schedule, dense=dense)
        except StepTooLarge as refusal:
            log(f"{name}: {refusal}")
            return [None] * plan.sparse_looks
        values = [point.perplexity for point in points[: plan.sparse_looks]]
        return [value if math.isfinite(value) else None for value in values]

    key = [plain(run), every, plan.sparse_looks]
    curve: list[float | None] = cached_value(Path(plan.where), name, key, compute)
    return curve


def widths(plan: SpeedupPlan, log: Log) -> dict[str, Any]:
    """The bytes of a push, by vocabulary and B, with mini-batches of 64."""
    rows = {}
    for vocabulary, mean_length in plan.widths:
        log(f"bytes of a push with {vocabulary} words")
        world = _world(vocabulary, mean_length, 64 * max(plan.width_local_updates) + plan.kept, plan)
        run = run_of(world, model(plan, "average"), Solo(), 1)
        rows[str(vocabulary)] = _topic_costs.push_bytes(run, plan.width_local_updates)
    return rows
