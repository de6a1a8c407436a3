"""Topic models against gensim, scikit-learn and tomotopy on one core; DPSVI by step rule and by ``init``."""

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
from murmurate.bench._peer_protocols.topics_windows import write
from murmurate.bench._result import Log, median, ratios, spread
from murmurate.bench._server import Server, start_servers
from murmurate.datasets.corpus import Corpus
from murmurate.datasets.generated import generate, library_text
from murmurate.errors import RunFailed
from murmurate.ranges import PositiveFloat, PositiveInt
from murmurate.workloads.topics import Topics

NAME = "topics"
SUMMARY = "topic models against gensim, scikit-learn and tomotopy: speed, quality, and the paper's step rule"

PEERS = ("gensim", "scikit-learn", "tomotopy")
_OURS = "murmurate"
_20_ITERATIONS = " 20 iterations"
ALPHA, PRIOR = 0.08, 0.05
# settings that gensim, scikit-learn and we have in common (Hoffman et al. 2010: kappa, tau0)
_COMMON = {"topics": 50, "alpha": ALPHA, "prior": PRIOR, "batch": 1024, "forgetting": 0.5, "delay": 1.0}
_OWN = {"topics": 50, "alpha": ALPHA, "prior": PRIOR}  # all else is TopicModel's default
# what these libraries' own defaults are
_THEIRS = {
    "gensim": {"batch": 2000, "forgetting": 0.5, "delay": 1.0},
    "scikit-learn": {"batch": 128, "forgetting": 0.7, "delay": 10.0},
}
SWEEPS = 30  # sweeps of tomotopy's sampler after which DPSVI is compared with it


@dataclasses.dataclass(frozen=True)
class Contender:
    """A library with its options; it is evaluated after each of ``passes`` through the corpus."""

    label: str
    library: str
    options: dict[str, Any]
    passes: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class TopicsPlan:
    """documents: number of documents of the generated corpus. vocabulary: number of words of its vocabulary.
    mean_length: mean number of words of a document. held_out: number of further documents, for evaluation.

    real: whether the text of Python's standard library is a second corpus. passes: number of passes of all
    contenders but the sampler, those of ``slow_passes``, and DPSVI, which makes four times as many.
    slow_passes: number of passes of contenders with more than 20 iterations per document. sweeps: number of
    sweeps of the sampler (tomotopy). rounds: number of repetitions, each with another seed. trap: number of
    documents from which each step rule learns. stream: whether a corpus of NYTimes's size is streamed, too.

    peers: the other libraries.
    """

    documents: PositiveInt = 20_000
    held_out: PositiveInt = 1_000
    vocabulary: PositiveInt = 10_000
    mean_length: PositiveFloat = 229
    real: bool = True
    passes: PositiveInt = 2
    slow_passes: PositiveInt = 1
    sweeps: PositiveInt = 40
    rounds: PositiveInt = 2
    trap: PositiveInt = 32_000
    peers: tuple[str, ...] = PEERS
    stream: topics_stream.StreamPlan | None = None


QUICK = TopicsPlan()
FULL = TopicsPlan(passes=5, slow_passes=5, sweeps=100, rounds=3, trap=200_000, stream=topics_stream.FULL)


def contenders(plan: TopicsPlan) -> list[Contender]:
    """All contenders on one corpus, ours first."""
    marks, slow = ((0.25, 0.5, *range(1, n + 1)) for n in (plan.passes, plan.slow_passes))
    random = {**_COMMON, "init": "random"}
    nodes = {**NODES, "local_updates": 3}
    average = {"step_rule": "average", "rate": 0.15}
    dpsvi = {**_OWN, **average, "batch": 256, "replicas": 4, "strategy": nodes}
    contenders = [
        Contender(f"{_OURS}{_20_ITERATIONS}", _OURS, {**random, "iterations": 20}, marks),
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
    for name, theirs in _THEIRS.items():
        contenders.append(Contender(f"{name}{_20_ITERATIONS}", name, {**_COMMON, "iterations": 20}, marks))
        contenders.append(Contender(name, name, {**_COMMON, "iterations": None}, slow))
        defaults = {**_COMMON, **theirs, "iterations": None}
        contenders.append(Contender(f"{name} defaults", name, defaults, slow))
    same = {**_COMMON, "iterations": 20, "precision": "float32"}  # as gensim and we compute
    contenders.append(Contender(f"scikit-learn float32{_20_ITERATIONS}", "scikit-learn", same, marks))
    contenders.append(Contender("tomotopy", "tomotopy", _OWN, (*range(10, plan.sweeps, 10), plan.sweeps)))
    return contenders


# four nodes of one thread, which take turns on the one core
NODES = {"name": "dpsgd", "threads": 1, "local_updates": 15, "batch": 4}
_RULES, _STARTS = ("paper", "average", "robbins-monro"), ("random", "documents", "svi")


def step_rules(plan: TopicsPlan) -> list[Contender]:
    """Every step rule from every initialisation under DPSVI, and its baselines.

    A speed-up by the paper's rule is relative to one worker that pushes after each step: p = B = M = 1.
    """
    marks = tuple(i / 8 * plan.trap / plan.documents for i in range(1, 9))
    every_rule = [
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
        every_rule.append(Contender(f"paper, p = B = M = 1, from {start}", _OURS, options, marks))
    every_rule.append(Contender("svi, the paper's baseline", _OURS, {**_COMMON, "init": "random"}, marks))
    return every_rule


class Point(NamedTuple):
    """A library's perplexity after so many documents and CPU seconds."""

    documents: int
    cpu_seconds: float
    perplexity: float


Curves = dict[str, list[list[Point]]]  # label -> round -> points


def measure(plan: TopicsPlan, log: Log) -> dict[str, Any]:
    """Curves of perplexity against CPU seconds, and figures from them; see ``benchmarks/README.md``."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="topics-")))
        servers, peers = start_servers(stack, "murmurate.bench._topics_server", plan.peers, log)
        _warm_up(servers, folder)
        corpora = _corpora(plan)
        curves = {
            name: _race(servers, contenders(plan), pair, folder, plan.rounds, log)
            for name, pair in corpora.items()
        }
        rules = _race(servers, step_rules(plan), corpora["generated"], folder, 1, log)
    streamed = None if plan.stream is None else topics_stream.measure(plan.stream, log)
    return {
        "simd": native.simd,
        **headline(curves["generated"]),
        "corpora": {
            name: [_entry(label, rounds) for label, rounds in by_label.items()]
            for name, by_label in curves.items()
        },
        "to_the_peers_perplexity": {name: to_the_peers(by_label) for name, by_label in curves.items()},
        "dpsvi_and_the_sampler": {
            name: dpsvi_against_sampler(by_label, plan) for name, by_label in curves.items()
        },
        "step_rules": [_entry(label, rounds) for label, rounds in rules.items()],
        "unigram_perplexity": {name: _unigram(*pair) for name, pair in corpora.items()},
        "stream": streamed,
        "peers": peers,
    }


def generated(plan: TopicsPlan) -> tuple[Corpus, Corpus]:
    """(training documents, held-out documents)."""
    count = plan.documents + plan.held_out
    corpus = generate(count, plan.vocabulary, mean_length=plan.mean_length, seed=0).corpus
    return corpus.select(range(plan.documents)), corpus.select(range(plan.documents, count))


def _corpora(plan: TopicsPlan) -> dict[str, tuple[Corpus, Corpus]]:
    pairs = {"generated": generated(plan)}
    if plan.real:
        corpus = library_text()
        # shuffled here, because gensim and scikit-learn take documents in the given order
        order = np.random.default_rng(0).permutation(len(corpus))
        held_out = len(corpus) // 20
        pairs["library"] = corpus.select(order[held_out:]), corpus.select(order[:held_out])
    return pairs


def _warm_up(servers: dict[str, Server], folder: Path) -> None:
    """Make a small fit with each library, because libraries load some of their code at the first fit."""
    small = generate(100, 200, 5, 20, seed=0).corpus
    for name, server in servers.items():
        fit(server, small, Contender(name, name, {**_COMMON, "iterations": 5}, (5.0,)), 0, folder)


def fit(
    server: Server, corpus: Corpus, contender: Contender, seed: int, folder: Path
) -> list[tuple[int, float, np.ndarray]]:
    """(documents, CPU seconds, lambda [V, K]) at each mark. Raises RunFailed if the library fails."""
    path = folder / "corpus.npz"
    write(path, corpus)
    marks = [max(1, round(p * len(corpus))) for p in contender.passes]
    # passes of the library's own loop, enough to reach the last mark
    options = {**contender.options, "seed": seed, "passes": math.ceil(contender.passes[-1])}
    request = {"corpus": str(path), "options": options, "marks": marks, "out": str(folder / "topics")}
    answer = server.ask(request)
    if "failed" in answer:
        raise RunFailed(f"{contender.label}: {answer['failed']}")
    return [(p["documents"], p["cpu_seconds"], np.load(p["topics"])) for p in answer["curve"]]


def _race(
    servers: dict[str, Server],
    contenders: list[Contender],
    pair: tuple[Corpus, Corpus],
    folder: Path,
    rounds: int,
    log: Log,
) -> Curves:
    """Fit all contenders in turn, round after round, and evaluate their topics with the same code."""
    train, test = pair
    curves: Curves = {}
    for seed in range(rounds):
        for contender in contenders:
            if contender.library not in servers:
                continue
            fitted = fit(servers[contender.library], train, contender, seed, folder)
            points = [Point(n, cpu, perplexity(matrix, test)) for n, cpu, matrix in fitted]
            curves.setdefault(contender.label, []).append(points)
            rate, end = _rate(points), points[-1].perplexity
            log(f"{contender.label}: {rate:,.0f} documents a CPU second, perplexity {end:,.0f}")
    return curves


def perplexity(matrix: np.ndarray, test: Corpus) -> float:
    """Perplexity of document completion, with the same alpha for all libraries."""
    topics = Topics(torch.from_numpy(matrix), torch.full((matrix.shape[1],), ALPHA))
    return topics.completion_perplexity(test)


def _unigram(train: Corpus, test: Corpus) -> float:
    """Perplexity of word frequencies, without topics."""
    counts = np.bincount(train.words, train.counts, minlength=train.vocabulary_size) + PRIOR
    return perplexity(counts.astype(np.float32)[:, None], test)


def _rate(points: list[Point]) -> float:
    return points[-1].documents / points[-1].cpu_seconds


def _entry(label: str, rounds: list[list[Point]]) -> dict[str, Any]:
    """A contender's row: rate, final figures, and the median curve."""
    return {
        "label": label,
        "documents_per_second": spread([_rate(points) for points in rounds]),
        "perplexity": spread([points[-1].perplexity for points in rounds]),
        "cpu_seconds": spread([points[-1].cpu_seconds for points in rounds]),
        "curve": [point._asdict() for point in median_curve(rounds)],
    }


def median_curve(rounds: list[list[Point]]) -> list[Point]:
    """The median over rounds at each mark."""
    return [
        Point(at[0].documents, median([p.cpu_seconds for p in at]), median([p.perplexity for p in at]))
        for at in zip(*rounds, strict=True)
    ]


def headline(curves: Curves) -> dict[str, Any]:
    """The main figures: the generated corpus, 20 iterations for all."""
    ours = curves[f"{_OURS}{_20_ITERATIONS}"]
    figures: dict[str, Any] = {
        "documents_per_second": median([_rate(points) for points in ours]),
        "perplexity": median([points[-1].perplexity for points in ours]),
        "perplexity_defaults": median([p[-1].perplexity for p in curves[f"{_OURS} defaults"]]),
    }
    peers = {"scikit-learn": "sklearn", "scikit-learn float32": "sklearn_float32", "gensim": "gensim"}
    for name, key in peers.items():
        theirs = curves.get(f"{name}{_20_ITERATIONS}")
        ratio, end = None, None
        if theirs is not None:
            ratio = median(ratios([_rate(points) for points in ours], [_rate(points) for points in theirs]))
            end = median([points[-1].perplexity for points in theirs])
        figures[f"ratio_{key}"], figures[f"perplexity_{key}"] = ratio, end
    return figures


def first_at(points: list[Point], most: float) -> Point | None:
    """The first point with a perplexity of at most ``most``."""
    return next((point for point in points if point.perplexity <= most), None)


def to_the_peers(curves: Curves) -> dict[str, Any]:
    """CPU seconds to the final perplexity of the best of gensim's and scikit-learn's contenders, in each
    round to that of the round; None if ours does not reach it in every round."""
    ends = {
        label: median_curve(rounds)[-1].perplexity
        for label, rounds in curves.items()
        if label.startswith(("gensim", "scikit-learn"))
    }
    if not ends:
        return {}
    best = min(ends, key=lambda label: ends[label])
    goals = [points[-1].perplexity for points in curves[best]]

    def seconds(rounds: list[list[Point]]) -> list[float]:
        reached = [first_at(points, goal) for points, goal in zip(rounds, goals, strict=True)]
        return [point.cpu_seconds for point in reached if point is not None] if all(reached) else []

    theirs = seconds(curves[best])
    row: dict[str, Any] = {"peer": best, "perplexity": ends[best], "cpu_seconds": median(theirs), "ours": {}}
    for label, rounds in curves.items():
        if label.startswith(_OURS):
            ours = seconds(rounds)
            row["ours"][label] = {
                "cpu_seconds": median(ours) if ours else None,
                "times_faster": median(ratios(theirs, ours)) if ours else None,
            }
    return row


def dpsvi_against_sampler(curves: Curves, plan: TopicsPlan) -> dict[str, Any]:
    """DPSVI's final figures, and when it reaches the perplexity of tomotopy after 30 sweeps."""
    ours = median_curve(curves[f"{_OURS} dpsvi"])
    row: dict[str, Any] = {"perplexity": ours[-1].perplexity, "cpu_seconds": ours[-1].cpu_seconds}
    rounds = curves.get("tomotopy")
    swept = None if rounds is None or plan.sweeps < SWEEPS else median_curve(rounds)[SWEEPS // 10 - 1]
    if swept is not None:
        as_good = first_at(ours, swept.perplexity)
        row["sampler_perplexity"], row["sampler_cpu_seconds"] = swept.perplexity, swept.cpu_seconds
        row["cpu_seconds_to_the_samplers"] = None if as_good is None else as_good.cpu_seconds
    return row
