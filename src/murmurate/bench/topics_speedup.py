"""DPSVI's speed-up (Mohamad et al., eq. 12, Fig. 1 to 3), and what its pushes of a few rows cost and give."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from murmurate.bench import _topic_costs, _topic_real, _topic_runs
from murmurate.bench._kept import kept_value
from murmurate.bench._result import Log
from murmurate.bench._topic_costs import Costs
from murmurate.bench._topic_plan import FULL, Plan
from murmurate.bench._topic_runs import Look, Looking
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

_DEADLINE_SECONDS = 60.0


PAPER = {
    "linear_up_to_workers": 14,
    "linear_up_to_threads": 8,
    "slower_from_both": 6,
    "source": "Mohamad et al., section 4.1.1 to 4.1.3; Fig. 1 to 3 are drawn, not printed",
}
SAID = (
    "Simulated threads have a core each: those of a real node contend for its memory's bandwidth. The "
    "worker's end of a message is charged what the master's was measured to cost."
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A point of Fig. 1 to 3 under a step rule. batch: M."""

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


def measure(full: bool, log: Log, plan: Plan | None = None) -> dict[str, Any]:
    """TSP = T(SVI) / T(DPSVI) at equal perplexity of documents kept back.

    T(SVI) is given for two: ``serial`` is DPSVI's own rule at nW = p = B = M = 1, and ``svi`` the paper's
    best (mini-batches of 1024, kappa 0.5, tau0 1), at what serial comes to after half the documents.
    ``speedup`` is over the panel's first case, that with the fewest replicas, times as many (``largest``:
    over the first of ``threads``): what Fig. 1 to 3 call linear can be only that, as the step rule makes
    steps shorter where p, B or M grow. Time is resolved to the master's ``folds``: where they are few, so is
    what can be said. What was measured below ``plan.where`` is not measured again.
    """
    plan = plan or (FULL if full else Plan())
    where = Path(plan.where)
    where.mkdir(parents=True, exist_ok=True)
    world = _world(plan.vocabulary, plan.mean_length, plan.documents, plan)
    asked = [world.path, plan.measured_updates, plan.pushes, plan.width_local_updates]
    cost = Costs(**kept_value(where, "costs", asked, lambda: dataclasses.asdict(_costs(plan, world, log))))
    svi = run_of(world, svi_model(plan), Solo(), 1)
    return {
        "costs": dataclasses.asdict(cost),
        "paper": PAPER,
        "said": SAID,
        "real": _topic_real.real(plan, world, log) if plan.real_documents else None,
        "sparse": {"perplexity": sparse(plan, world, log), "push_bytes": widths(plan, log)},
        "rules": {rule: _rule(rule, svi, cost, plan, log) for rule in ("paper", "average")},
        "plan": dataclasses.asdict(plan),
    }


# -- what is run ----------------------------------------------------------------------------------------


def _world(vocabulary: int, mean_length: float, documents: int, plan: Plan) -> CorpusWorld:
    path = Path(plan.where) / f"corpus-{vocabulary}-{mean_length:g}-{documents}-{plan.topics}.npz"
    if not path.exists():
        write(generate(documents, vocabulary, plan.topics, mean_length).corpus, path, "npz")
    return CorpusWorld(path=str(path.resolve()), validation=plan.kept, test=0)


def run_of(world: CorpusWorld, model: TopicModel, strategy: Strategy, replicas: int) -> Run:
    base = replace(recipe("corpus-lda"), launcher="simulated")
    return replace(base, world=world, learner=model, strategy=strategy, replicas=replicas)


def svi_model(plan: Plan) -> TopicModel:
    """The paper's baseline at its best (section 4.1)."""
    return TopicModel(topics=plan.topics, batch=1024, delay=1.0, forgetting=0.5, validate_every=0)


def model(plan: Plan, rule: str) -> TopicModel:
    rate = 0.1 if rule == "paper" else plan.rate
    return TopicModel(topics=plan.topics, batch=64, step_rule="average", rate=rate, validate_every=0)


def dpsvi(
    plan: Plan, world: CorpusWorld, case: Case, shrinks: Literal["present", "pulled"] = "present"
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


def cases(plan: Plan, rule: str) -> Iterator[Case]:
    """Under ``average`` M is nW: as rho is 1 / nW, more would move v by more than the nodes did."""

    def batch(workers: int, M: int) -> int:
        return M if rule == "paper" else workers

    for B in plan.workers_local_updates:
        for n in plan.workers:
            yield Case("workers", rule, n, 1, B, batch(n, plan.workers_batch))
    for p in plan.threads:
        yield Case("threads", rule, 1, p, 15, batch(1, plan.batch))
    for B in plan.local_updates:
        for n in plan.both:
            yield Case("both", rule, n, n, B, batch(n, plan.batch))
    if plan.largest is not None:
        workers, threads = plan.largest
        yield Case("largest", rule, workers, threads, 15, batch(workers, plan.batch))


def _costs(plan: Plan, world: CorpusWorld, log: Log) -> Costs:
    serial = run_of(world, model(plan, "paper"), Solo(), 1)
    svi = run_of(world, svi_model(plan), Solo(), 1)
    pushing = {B: dpsvi(plan, world, Case("", "average", 1, 1, B, 1)) for B in plan.width_local_updates}
    return _topic_costs.costs(serial, svi, pushing, plan.measured_updates, plan.pushes, log)


# -- Fig. 1 to 3 ----------------------------------------------------------------------------------------


def cluster(seconds: float, cost: Costs, plan: Plan) -> Cluster:
    network = f"{plan.network},handling={cost.message_seconds}"
    if cost.byte_seconds:
        network += f",handling-bandwidth={1 / cost.byte_seconds}"
    return Cluster(compute=f"lognormal:{seconds},{cost.step_spread}", network=network)


def _rule(rule: str, svi: Run, cost: Costs, plan: Plan, log: Log) -> dict[str, Any]:
    world = svi.world
    if not isinstance(world, CorpusWorld):
        raise ValueError("topics are found in a corpus")
    kept = _topic_runs.validation(svi)

    def looks(name: str, run: Run, seconds: float, target: float, most: int) -> list[Look]:
        def look() -> list[Look]:
            log(name)
            looking = Looking(kept, 1_000, plan.look_factor, most, target, folded=True)
            return _topic_runs.looks(run, cluster(seconds, cost, plan), looking)

        key = [plain(run), dataclasses.asdict(cost), target, most, plan.network, plan.look_factor]
        return [Look(*one) for one in kept_value(Path(plan.where), name, key, look)]

    serial = run_of(world, model(plan, rule), Solo(), 1)
    if rule == "paper":  # eta and rho both, so that the step is their product
        serial = dpsvi(plan, world, Case("", rule, 1, 1, 1, 1))
    seen = looks(f"{rule} serial", serial, cost.step_seconds, 0.0, plan.target_documents)
    target = seen[-1].perplexity
    serial_at = _topic_runs.reached(seen, target)
    # SVI's steps stay longer, and its perplexity further up: against it a target that it comes to
    half = [one for one in seen if one.documents <= plan.target_documents // 2] or seen[:1]
    near = half[-1].perplexity
    svi_at = _topic_runs.reached(looks(f"{rule} svi", svi, cost.svi_step_seconds, near, plan.most), near)
    rows: list[dict[str, Any]] = []
    first: dict[tuple[str, int], tuple[Case, Look | None]] = {}
    for case in cases(plan, rule):
        run = dpsvi(plan, world, case)
        path = looks(case.name, run, cost.step_seconds, target, plan.most)
        at = _topic_runs.reached(path, target)
        # the largest is alone in its panel: it is measured against the one node of one thread beside it
        group = ("threads" if case.panel == "largest" else case.panel, case.local_updates)
        first.setdefault(group, (case, at))
        over_svi = _over(svi_at, _topic_runs.reached(path, near))
        rows.append(_row(case, at, serial_at, first[group]) | {"tsp_svi": over_svi})
    eta = 0.1 if rule == "paper" else plan.rate
    return {
        "target_perplexity": target,
        "target_perplexity_svi": near,
        "serial": {
            "step": eta * eta if rule == "paper" else eta,
            "batch": 64,
            "reached": serial_at and serial_at._asdict(),
        },
        "svi": {"step": "(1 + t) ** -0.5", "batch": 1024, "reached": svi_at and svi_at._asdict()},
        "cases": rows,
    }


def _over(other: Look | None, at: Look | None) -> float | None:
    """How many times as fast as the other."""
    return None if at is None or other is None else other.seconds / at.seconds


def _row(case: Case, at: Look | None, serial: Look | None, first: tuple[Case, Look | None]) -> dict[str, Any]:
    """eta, rho: as scaled. speedup: over the panel's first, times how many replicas that had."""
    p, B, M = case.threads, case.local_updates, case.batch
    few, alone = first[0].workers * first[0].threads, _over(first[1], at)
    return {
        **dataclasses.asdict(case),
        "eta_and_rho": scaled_rate(0.1, p, B, M) if case.rule == "paper" else None,
        "documents": None if at is None else at.documents,
        "folds": None if at is None else at.folds,
        "seconds": None if at is None else at.seconds,
        "tsp_serial": _over(serial, at),
        "speedup": None if alone is None else alone * few,
        "documents_per_second": None if at is None else at.documents / at.seconds,
    }


# -- sparse pushes --------------------------------------------------------------------------------------


def sparse(plan: Plan, world: CorpusWorld, log: Log) -> list[dict[str, Any]]:
    """Perplexities with pushes of rows and of whole vectors under one schedule, 4 workers, M = 4.

    A dense push shrinks the v that was pulled, which may be some folds old: where steps are long counts
    become negative and are read as 0. ``sparse`` does the same, and is refused there (None); ``present``
    shrinks the present v.
    """
    rows = []
    first = plan.sparse_documents // plan.sparse_looks
    for rate in plan.sparse_rates:
        for B in plan.sparse_local_updates:
            chosen = replace(plan, rate=rate)
            case = Case("", "average", 4, 1, B, 4)
            pulled, present = dpsvi(chosen, world, case, "pulled"), dpsvi(chosen, world, case)
            kinds = {"sparse": (pulled, False), "dense": (pulled, True), "present": (present, False)}
            found = {kind: _pushing(plan, *kinds[kind], first, f"{kind} pushes", log) for kind in kinds}
            rows.append(
                {
                    "local_updates": B,
                    "rate": rate,
                    "documents": first,
                    **found,
                    "most_apart": _most_apart(found["sparse"], found["dense"]),
                    "present_most_apart": _most_apart(found["present"], found["dense"]),
                }
            )
    return rows


def _most_apart(ours: list[float | None], theirs: list[float | None]) -> float | None:
    """The largest relative difference of two curves; None if one of them breaks off."""
    apart = [None if a is None or b is None else abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]
    whole = [one for one in apart if one is not None]
    return max(whole) if len(whole) == len(apart) else None


def _pushing(plan: Plan, run: Run, dense: bool, first: int, name: str, log: Log) -> list[float | None]:
    def look() -> list[float | None]:
        log(name)
        looking = Looking(_topic_runs.validation(run), first, 1, first * plan.sparse_looks)
        free = Cluster(compute="lognormal:0.01,0.1", network="latency=1e-4")
        try:
            seen = _topic_runs.looks(run, free, looking, dense=dense)
        except StepTooLarge as refusal:
            log(f"{name}: {refusal}")
            return [None] * plan.sparse_looks
        values = [one.perplexity for one in seen[: plan.sparse_looks]]
        return [value if math.isfinite(value) else None for value in values]

    key = [plain(run), first, plan.sparse_looks]
    found: list[float | None] = kept_value(Path(plan.where), name, key, look)
    return found


def widths(plan: Plan, log: Log) -> dict[str, Any]:
    """Bytes of a push by vocabulary and B, with mini-batches of 64."""
    found = {}
    for vocabulary, mean_length in plan.widths:
        log(f"bytes of a push with {vocabulary} words")
        world = _world(vocabulary, mean_length, 64 * max(plan.width_local_updates) + plan.kept, plan)
        run = run_of(world, model(plan, "average"), Solo(), 1)
        found[str(vocabulary)] = _topic_costs.push_bytes(run, plan.width_local_updates)
    return found
