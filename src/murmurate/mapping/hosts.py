"""Predicts configurations on several equal hosts, by runs on the simulated cluster."""

from __future__ import annotations

import dataclasses
import itertools
import math
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Capability
from murmurate.mapping.candidates import Candidate, strategies_of
from murmurate.mapping.cost import Prediction
from murmurate.mapping.periods import label, period_of
from murmurate.mapping.pilot import in_one_process, steady
from murmurate.mapping.profile import NETWORK, DeviceProfile, key
from murmurate.simulation.cluster import Cluster
from murmurate.simulation.start import simulate
from murmurate.spec import Placement
from murmurate.strategies.interface import Strategy
from murmurate.training.preflight import check_compression
from murmurate.training.run import Run

# the least numbers of updates, batches and exchange periods of each replica in a simulated run
_UPDATES, _BATCHES, _PERIODS = 40, 10, 2


def on_hosts(
    best: Iterable[Candidate],
    run: Run,
    profile: DeviceProfile,
    hosts: int,
    log: Callable[[str], None],
    strategies: Sequence[Strategy] = (),
    most: int | None = None,
) -> Iterator[tuple[Candidate, Run, Prediction]]:
    """The first ``most`` (None: all) of the candidates ``best`` of ``run`` that several hosts can run, each
    with its run and prediction on all of ``hosts`` hosts.

    A learner's own work takes the seconds that the cost model predicts, with the deviation that was measured,
    and the strategy's own code sends messages through a simulated network. A candidate with one replica
    has no strategy yet: it gets each of ``strategies`` (() for those of ``strategies_of``). Left out
    are strategies that need shared memory, and what cannot be simulated, or fails there.
    """
    link = profile.links.get(NETWORK)
    network = "latency=1e-4,bandwidth=1e9"
    if link is not None:
        network = f"latency={link.latency_seconds:g},bandwidth={link.bytes_per_second:g}"
    log(f"{hosts} hosts, {'assumed' if link is None else link.how} network: {network}")
    if run.compression != "none":
        log(f"compression is not modelled: vectors are counted as without --compression {run.compression}")
    considered = strategies or strategies_of(run)
    for chosen in filter(_shares_memory, considered):
        log(f"left out: {chosen.name}, as it needs shared memory, which several hosts do not have")
    apart = list(itertools.filterfalse(_shares_memory, considered))
    suited = (each for each in best if each.run.replicas == 1 or not _shares_memory(each.run.strategy))
    for candidate in itertools.islice(suited, most):
        variant, prediction = candidate.run, candidate.prediction
        deviation = profile.recipes[key(variant)].deviation
        replicas = hosts * variant.replicas
        for chosen in [variant.strategy] if variant.replicas > 1 else apart:
            whole = dataclasses.replace(variant, replicas=replicas, strategy=chosen)
            cluster = Cluster(compute_model(prediction.own_seconds, deviation), network)
            try:
                chosen.check(replicas)
                check_compression(whole)
                seconds = _batch_seconds(whole, cluster)
            except (Refusal, RunFailed) as failure:
                log(f"left out: {label(chosen)} among {replicas} replicas: {failure}")
                continue
            yield candidate, whole, _predicted(prediction, hosts, replicas, seconds)


def _shares_memory(strategy: Strategy) -> bool:
    return Capability.SHARED_MEMORY in strategy.needs


def compute_model(seconds: float, deviation: float) -> str:
    """The cluster's log-normal step time with this mean, and this standard deviation relative to it."""
    variance = math.log1p(deviation**2)
    return f"lognormal:{seconds * math.exp(-variance / 2):g},{math.sqrt(variance):g}"


def _batch_seconds(run: Run, cluster: Cluster) -> float:
    """Virtual seconds that a replica takes for a batch. Raises Refusal if the run cannot be simulated, and
    RunFailed if it fails. A signal that stops the simulation also stops the plan (Ctrl-C: KeyboardInterrupt).
    """
    found, evaluation = steady(run), run.evaluation
    if hasattr(evaluation, "eval_episodes"):
        evaluation = dataclasses.replace(evaluation, eval_episodes=1)
    simulated = dataclasses.replace(
        found,
        source=in_one_process(found.source),  # what other processes do is part of the prediction
        placement=Placement(),  # the devices of the hosts need not be here
        evaluation=evaluation,
        minutes=None,
        updates=max(
            _UPDATES,
            _BATCHES * run.learner.updates(1),
            _PERIODS * period_of(run.strategy),
        ),
        launcher="local",  # a simulated run launches no processes
    )
    with tempfile.TemporaryDirectory(prefix="murmurate-plan-") as folder:
        finish = simulate(simulated, cluster, Path(folder) / "run", quiet=True)
    if finish.code > 128:
        signal.raise_signal(finish.code - 128)
    assert finish.summary is not None
    if finish.code:
        raise RunFailed(finish.summary["exit"])
    rate: float = finish.summary["updates_per_virtual_second"] / run.learner.updates(1)
    return run.replicas / rate


def _predicted(one_host: Prediction, hosts: int, replicas: int, seconds: float) -> Prediction:
    """The prediction for ``replicas`` replicas on all hosts, whose learners take ``seconds`` for a batch."""
    updates = replicas / max(seconds, one_host.least_seconds)
    ratio = updates / one_host.updates_per_second
    parts: dict[str, Any] = {"exchange": max(0.0, seconds - one_host.own_seconds), "waiting": 0.0}
    return dataclasses.replace(
        one_host,
        env_steps_per_second=one_host.env_steps_per_second * ratio,
        updates_per_second=updates,
        seconds=one_host.seconds | parts,
        bottleneck="learner" if seconds > one_host.least_seconds > 0 else one_host.bottleneck,
        busy=one_host.busy * min(ratio, hosts),
    )
