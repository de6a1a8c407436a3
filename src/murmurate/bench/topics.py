"""Topic models beside gensim, scikit-learn and tomotopy on one core; the paper's step rule; a stream."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from murmurate import native
from murmurate.bench import topics_stream
from murmurate.bench._result import Log, median, spread
from murmurate.bench._server import Server, absent
from murmurate.bench._windows.topics_windows import write
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.generated import generate, library_text
from murmurate.errors import RunFailed
from murmurate.workloads.topics import Topics

NAME = "topics"
SUMMARY = "topic models beside gensim, scikit-learn and tomotopy: speed, quality, and the paper's step rule"

PEERS = ("gensim", "scikit-learn", "tomotopy")
_OURS = "murmurate"
_TWENTY = " 20 iterations"
ALPHA, PRIOR = 0.08, 0.05
# what gensim, scikit-learn and we have in common (Hoffman et al. 2010: kappa, tau0)
_COMMON = {"topics": 50, "alpha": ALPHA, "prior": PRIOR, "batch": 1024, "forgetting": 0.5, "delay": 1.0}
_OWN = {"topics": 50, "alpha": ALPHA, "prior": PRIOR}  # all else as TopicModel has it
SWEEPS = 30  # of tomotopy, which DPSVI is to be better than


@dataclasses.dataclass(frozen=True)
class Contender:
    """A library with its options; ``passes`` through the corpus are its marks."""

    label: str
    library: str
    options: dict[str, Any]
    passes: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """documents, vocabulary, mean_length: of the generated corpus, beside which as many as ``held_out`` are
    judged by. real: whether the standard library's own text is another corpus. passes: of all but the
    sampler. slow_passes: of those with more than 20 iterations a document. rounds: in each, everybody begins
    anew with another seed. trap: documents of each step rule. stream: whether a corpus of NYTimes's size is
    streamed.
    """

    documents: int = 20_000
    held_out: int = 1_000
    vocabulary: int = 10_000
    mean_length: float = 229
    real: bool = True
    passes: int = 2
    slow_passes: int = 1
    sweeps: int = 40
    rounds: int = 2
    trap: int = 32_000
    peers: tuple[str, ...] = PEERS
    stream: topics_stream.Stream | None = None


FULL = Plan(passes=5, slow_passes=5, sweeps=100, rounds=3, trap=200_000, stream=topics_stream.Stream())


def contenders(plan: Plan) -> list[Contender]:
    """All of one corpus, ours first."""
    marks, slow = ((0.25, 0.5, *range(1, n + 1)) for n in (plan.passes, plan.slow_passes))
    random = {**_COMMON, "init": "random"}
    nodes = {**NODES, "local_updates": 3}
    average = {"step_rule": "average", "rate": 0.15}
    dpsvi = {**_OWN, **average, "batch": 256, "replicas": 4, "strategy": nodes}
    field = [
        Contender(f"{_OURS}{_TWENTY}", _OURS, {**random, "iterations": 20}, marks),
        Contender(f"{_OURS} 50 iterations", _OURS, {**random, "iterations": 50}, slow),
        Contender(f"{_OURS} 100 iterations", _OURS, {**random, "iterations": 100}, slow),
        Contender(f"{_OURS} batches of 256", _OURS, {**random, "iterations": 20, "batch": 256}, marks),
        Contender(f"{_OURS} defaults", _OURS, _OWN, marks),
        Contender(
            f"{_OURS} dpsvi",
            _OURS,
            dpsvi,
            (*marks, *(plan.passes * n for n in (1.5, 2, 2.5, 2.75, 3, 3.25, 3.5, 4))),
        ),
    ]
    for name in ("gensim", "scikit-learn"):
        field.append(Contender(f"{name}{_TWENTY}", name, {**_COMMON, "iterations": 20}, marks))
        field.append(Contender(name, name, {**_COMMON, "iterations": None}, slow))
    field.append(Contender("tomotopy", "tomotopy", _OWN, tuple(range(10, plan.sweeps + 1, 10))))
    return field


# four nodes of one thread, as in the paper's Fig. 1 to 3 each on one core
NODES = {"name": "dpsgd", "threads": 1, "local_updates": 15, "batch": 4}
_RULES, _STARTS = ("paper", "average", "robbins-monro"), ("random", "documents", "svi")


def traps(plan: Plan) -> list[Contender]:
    """Every step rule from every start under DPSVI; and one worker that pushes each step, p = B = M = 1,
    which is what a speed-up by the paper's rule is over."""
    marks = tuple(i / 8 * plan.trap / plan.documents for i in range(1, 9))
    every = [
        Contender(
            f"{rule} from {start}",
            _OURS,
            {**_OWN, "batch": 64, "step_rule": rule, "init": start, "replicas": 4, "strategy": NODES},
            marks,
        )
        for rule in _RULES
        for start in _STARTS
    ]
    single = {**NODES, "local_updates": 1, "batch": 1}
    for start in ("random", "documents"):
        options = {**_OWN, "batch": 64, "step_rule": "paper", "init": start, "strategy": single}
        every.append(Contender(f"paper, p = B = M = 1, from {start}", _OURS, options, marks))
    every.append(Contender("svi, the paper's baseline", _OURS, {**_COMMON, "init": "random"}, marks))
    return every


class Point(NamedTuple):
    """What a library came to after so many documents and CPU seconds."""

    documents: int
    cpu_seconds: float
    perplexity: float


Curves = dict[str, list[list[Point]]]  # label -> round -> points


def measure(full: bool, log: Log, plan: Plan | None = None) -> dict[str, Any]:
    """Curves of perplexity against CPU seconds, and what follows; see ``benchmarks/README.md``."""
    plan = plan or (FULL if full else Plan())
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="topics-")))
        field, peers = _started(plan, stack, log)
        _warm_up(field, folder)
        pairs = _corpora(plan)
        found = {
            name: _race(field, contenders(plan), pair, folder, plan.rounds, log)
            for name, pair in pairs.items()
        }
        trap = _race(field, traps(plan), pairs["generated"], folder, 1, log)
    streamed = None if plan.stream is None else topics_stream.measure(True, log, plan.stream)
    return {
        "simd": native.simd,
        **headline(found["generated"]),
        "corpora": {name: [_entry(label, c) for label, c in of.items()] for name, of in found.items()},
        "to_the_peers_perplexity": {name: to_the_peers(of) for name, of in found.items()},
        "dpsvi_and_the_sampler": {name: beside_the_sampler(of, plan) for name, of in found.items()},
        "step_rules": [_entry(label, curves) for label, curves in trap.items()],
        "unigram_perplexity": {name: _unigram(*pair) for name, pair in pairs.items()},
        "stream": streamed,
        "peers": peers,
        "plan": dataclasses.asdict(plan),
    }


def _generated(plan: Plan) -> tuple[Corpus, Corpus]:
    """(to learn from, to be judged by)."""
    every = plan.documents + plan.held_out
    corpus = generate(every, plan.vocabulary, mean_length=plan.mean_length, seed=0).corpus
    return corpus.select(range(plan.documents)), corpus.select(range(plan.documents, every))


def _corpora(plan: Plan) -> dict[str, tuple[Corpus, Corpus]]:
    pairs = {"generated": _generated(plan)}
    if plan.real:
        corpus = library_text()
        # left in this order: gensim and scikit-learn take documents as they come
        order = np.random.default_rng(0).permutation(len(corpus))
        few = len(corpus) // 20
        pairs["library"] = corpus.select(order[few:]), corpus.select(order[:few])
    return pairs


def _started(plan: Plan, stack: contextlib.ExitStack, log: Log) -> tuple[dict[str, Server], list[Any]]:
    field = {_OURS: stack.enter_context(Server.own("murmurate.bench._topics_own"))}
    peers = []
    for name in plan.peers:
        if (why := absent(name)) is not None:
            peers.append({"peer": name, "status": why})
            continue
        log(f"starting {name}")
        field[name] = stack.enter_context(Server.peer(name))
        peers.append({"peer": name, "status": "ran", "version": field[name].version})
    return field, peers


def _warm_up(field: dict[str, Server], folder: Path) -> None:
    """What a library loads when it is first used is not part of a fit."""
    few = generate(100, 200, 5, 20, seed=0).corpus
    for name, server in field.items():
        fit(server, few, Contender(name, name, {**_COMMON, "iterations": 5}, (5.0,)), 0, folder)


def fit(
    server: Server, corpus: Corpus, contender: Contender, seed: int, folder: Path
) -> list[tuple[int, float, np.ndarray]]:
    """(documents, CPU seconds, lambda [V, K]) at each mark."""
    path = folder / "corpus.npz"
    write(path, corpus)
    marks = [max(1, round(p * len(corpus))) for p in contender.passes]
    # a sampler's sweeps and a library's own passes: enough to come to the last mark
    options = {**contender.options, "seed": seed, "passes": math.ceil(contender.passes[-1])}
    request = {"corpus": str(path), "options": options, "marks": marks, "out": str(folder / "topics")}
    answer = server.say(request)
    if "failed" in answer:
        raise RunFailed(f"{contender.label}: {answer['failed']}")
    return [(p["documents"], p["cpu_seconds"], np.load(p["topics"])) for p in answer["curve"]]


def _race(
    field: dict[str, Server],
    every: list[Contender],
    pair: tuple[Corpus, Corpus],
    folder: Path,
    rounds: int,
    log: Log,
) -> Curves:
    """All in turn, round after round. What they found is judged in between, by the same code for all."""
    train, test = pair
    curves: Curves = {}
    for seed in range(rounds):
        for contender in every:
            if contender.library not in field:
                continue
            fitted = fit(field[contender.library], train, contender, seed, folder)
            points = [Point(n, cpu, perplexity(matrix, test)) for n, cpu, matrix in fitted]
            curves.setdefault(contender.label, []).append(points)
            n, cpu, at_the_end = points[-1]
            log(f"{contender.label}: {n / cpu:,.0f} documents a CPU second, perplexity {at_the_end:,.0f}")
    return curves


def perplexity(matrix: np.ndarray, test: Corpus) -> float:
    """Of document completion, with everybody's alpha."""
    topics = Topics(torch.from_numpy(matrix), torch.full((matrix.shape[1],), ALPHA))
    return topics.completion_perplexity(test)


def _unigram(train: Corpus, test: Corpus) -> float:
    """Of who counts words and knows no topics."""
    counts = np.bincount(train.words, train.counts, minlength=train.vocabulary_size) + PRIOR
    return perplexity(counts.astype(np.float32)[:, None], test)


def _rate(points: list[Point]) -> float:
    return points[-1].documents / points[-1].cpu_seconds


def _entry(label: str, rounds: list[list[Point]]) -> dict[str, Any]:
    """A contender's row: rate, end, and the median curve."""
    return {
        "label": label,
        "documents_per_second": spread([_rate(points) for points in rounds]),
        "perplexity": spread([points[-1].perplexity for points in rounds]),
        "cpu_seconds": spread([points[-1].cpu_seconds for points in rounds]),
        "curve": [point._asdict() for point in middle(rounds)],
    }


def middle(rounds: list[list[Point]]) -> list[Point]:
    """The median over rounds at each mark."""
    return [
        Point(at[0].documents, median([p.cpu_seconds for p in at]), median([p.perplexity for p in at]))
        for at in zip(*rounds, strict=True)
    ]


def headline(curves: Curves) -> dict[str, Any]:
    """The figures that the bars are about: the generated corpus, 20 iterations for all."""
    ours = curves[f"{_OURS}{_TWENTY}"]
    figures: dict[str, Any] = {
        "documents_per_second": median([_rate(points) for points in ours]),
        "perplexity": median([points[-1].perplexity for points in ours]),
        "perplexity_defaults": median([p[-1].perplexity for p in curves[f"{_OURS} defaults"]]),
    }
    for name, key in (("scikit-learn", "sklearn"), ("gensim", "gensim")):
        theirs = curves.get(f"{name}{_TWENTY}")
        ratio, end = None, None
        if theirs is not None:
            # round by round, so that what slows both of a pair cancels
            ratio = median([_rate(a) / _rate(b) for a, b in zip(ours, theirs, strict=True)])
            end = median([points[-1].perplexity for points in theirs])
        figures[f"ratio_{key}"], figures[f"perplexity_{key}"] = ratio, end
    return figures


def first_at(points: list[Point], most: float) -> Point | None:
    """The first mark with a perplexity of at most that."""
    return next((point for point in points if point.perplexity <= most), None)


def to_the_peers(curves: Curves) -> dict[str, Any]:
    """CPU seconds to the perplexity at which the best of gensim's and scikit-learn's four ends."""
    ends = {
        label: middle(rounds)[-1].perplexity
        for label, rounds in curves.items()
        if label.startswith(("gensim", "scikit-learn"))
    }
    if not ends:
        return {}
    best = min(ends, key=lambda label: ends[label])
    theirs = first_at(middle(curves[best]), ends[best])
    row: dict[str, Any] = {"peer": best, "perplexity": ends[best]}
    row["cpu_seconds"] = None if theirs is None else theirs.cpu_seconds
    row["ours"] = {}
    for label, rounds in curves.items():
        if label.startswith(_OURS):
            here = first_at(middle(rounds), ends[best])
            ratio = None if here is None or theirs is None else theirs.cpu_seconds / here.cpu_seconds
            seconds = None if here is None else here.cpu_seconds
            row["ours"][label] = {"cpu_seconds": seconds, "times_faster": ratio}
    return row


def beside_the_sampler(curves: Curves, plan: Plan) -> dict[str, Any]:
    """Where DPSVI ends, and when it is as good as tomotopy after 30 sweeps."""
    ours = middle(curves[f"{_OURS} dpsvi"])
    row: dict[str, Any] = {"perplexity": ours[-1].perplexity, "cpu_seconds": ours[-1].cpu_seconds}
    rounds = curves.get("tomotopy")
    swept = None if rounds is None or plan.sweeps < SWEEPS else middle(rounds)[SWEEPS // 10 - 1]
    if swept is not None:
        here = first_at(ours, swept.perplexity)
        row["sampler_perplexity"], row["sampler_cpu_seconds"] = swept.perplexity, swept.cpu_seconds
        row["cpu_seconds_to_the_samplers"] = None if here is None else here.cpu_seconds
    return row
