"""Topic models under strategies: DPSVI, answers that are late, and all others."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

from laws.centre import finish, is_centre, serve_until
from laws.topic_learners import MODEL, WORDS, batches, corpus, learner
from murmurate.datasets.corpus import Corpus
from murmurate.fabric.processes.fabric import run_members
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replica.vector import Replica
from murmurate.replicator.replicator import Replicator
from murmurate.spec import Batch
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.strategies.pull_gossip import PullGossip
from murmurate.strategies.solo import Solo
from murmurate.workloads.topic_model import TopicModel


def work(strategy, count, fabric):
    """A learner's part, or the centre's: what it came to, by the consensus of all."""
    torch.set_num_threads(1)
    replicator = Replicator(strategy, fabric)
    it = learner(replicator.replicate, MODEL)
    if strategy.centre and is_centre(fabric):
        serve_until(replicator, fabric)
        return replicator.consensus()["topics"]
    for batch in batches(fabric.rank, count=count):
        it.learn(batch)
    if strategy.centre:
        finish(replicator, fabric)
    else:
        replicator.publish()
        fabric.channel("end", torch.zeros(1)).mean_(torch.zeros(1))
    return replicator.consensus()["topics"]


def test_dpsvi_with_b_m_and_p_of_1_is_svi_with_step_rho_eta():
    """Mohamad et al., Algorithms 3 and 4: what is pushed counts rho of it."""
    rho = 0.25
    strategy = DPSGD(threads=1, local_updates=1, batch=1, global_learning_rate=rho, wait=True)
    found, _ = SimulatedFabric(2, seed=1).run([functools.partial(work, strategy, 12)] * 2)
    alone = learner(
        functools.partial(Replica), TopicModel(**{**vars(MODEL), "step_rule": "average", "rate": 0.1})
    )
    alone.replica.schedule = lambda t: rho * MODEL.eta(t)
    for batch in batches(count=12):
        alone.learn(batch)
    torch.testing.assert_close(found, alone.replica.values().detach(), rtol=1e-5, atol=2e-3)


def test_a_late_answer_leaves_topics_that_can_be_read():
    """What was learned since a push stays beside v', so a word that a topic lost meanwhile is below 0 there.

    Steps of a half, a master that hardly moves, and answers that are many steps late.
    """
    strategy = DPSGD(threads=1, local_updates=1, batch=1, global_learning_rate=0.01)
    model = TopicModel(**{**vars(MODEL), "step_rule": "average", "rate": 0.5})
    low = []

    def worker(fabric):
        replicator = Replicator(strategy, fabric)
        it = learner(replicator.replicate, model)
        it.replica.scale.keeps_scale = False  # whole vectors go to and fro
        if is_centre(fabric):
            serve_until(replicator, fabric)
            return it.estimate()
        for batch in batches(count=60):
            fabric.compute(1e-3)
            it.learn(batch)
            x = it.replica.params.detach().view(WORDS + 1, -1)
            low.append(float(x.min()))
            assert torch.isfinite(x).all()
            assert float(it.estimate().matrix.min()) > 0
        finish(replicator, fabric)
        return it.estimate()

    centre = SimulatedFabric(2, seed=3, latency=(5e-3, 2e-2)).run([worker] * 2)[1]
    assert min(low) < -MODEL.prior  # it did come to that
    assert centre.completion_perplexity(corpus()) < learner().estimate().completion_perplexity(corpus())


def late(strategy, count, fabric):
    """The least of all parameters that a node has ever had, of the master the topics in the end."""
    torch.set_num_threads(1)
    replicator = Replicator(strategy, fabric)
    it = learner(replicator.replicate, dataclasses.replace(MODEL, step_rule="average", rate=0.1))
    if is_centre(fabric):
        serve_until(replicator, fabric)
        return float(it.replica.values().min()), it.estimate()
    least = 0.0
    for batch in batches(fabric.rank, count=count):
        fabric.compute(1e-3)
        it.learn(batch)
        least = min(least, float(it.replica.values().min()))
    finish(replicator, fabric)
    return least, None


def test_pushes_later_than_asked_for_leave_counts_and_topics():
    """With an answer at once a fold takes 0.82 of v; these nodes learn on for 10 to 40 steps instead of 5."""
    strategy = DPSGD(threads=1, local_updates=5, batch=4)
    strategy.check(2, shrinks=0.1)
    found = SimulatedFabric(3, seed=0, latency=(0.005, 0.02)).run(
        [functools.partial(late, strategy, 150)] * 3
    )
    assert min(least for least, _ in found) >= 0
    start = learner().estimate().completion_perplexity(corpus())
    assert found[-1][1].completion_perplexity(corpus()) < 0.7 * start


def test_what_is_below_zero_counts_as_none():
    """The same step as from 0, but for what the numbers themselves are."""
    moves = []
    for floor in (-20.4, 0.0):
        it = learner()
        it.replica.scale.keeps_scale = False  # as under strategies that exchange dense vectors
        x = it.replica.params.detach().view(WORDS + 1, -1)
        x[:WORDS:7, 0] = floor
        before = x.clone()
        it.learn(next(batches()))
        moves.append(x - (1 - MODEL.eta(0)) * before)
    torch.testing.assert_close(*moves, rtol=1e-5, atol=1e-4)
    assert float(moves[0].min()) > -1e-4


@pytest.mark.parametrize("strategy", [Solo(), Hogwild(), AllReduce(), GALA(), PullGossip()])
def test_one_replica_is_solo_under_every_strategy(strategy):
    (found,) = SimulatedFabric(1, seed=0).run([functools.partial(work, strategy, 10)])
    alone = learner()
    for batch in batches(count=10):
        alone.learn(batch)
    torch.testing.assert_close(found, alone.replica.values().detach(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    "strategy",
    [Hogwild(), AllReduce(), GALA(), PullGossip(), DPSGD(threads=1, local_updates=3), DPSGD(threads=2)],
    ids=lambda s: f"{s.name} {getattr(s, 'threads', '')}",
)
def test_replicas_on_real_processes_find_topics_together(strategy):
    size = 2 + strategy.centre
    found = run_members(size, [functools.partial(work, strategy, 40)] * size)[0]
    it = learner()
    start = it.estimate().completion_perplexity(corpus())
    with torch.no_grad():
        it.replica.params.copy_(found)
    assert it.estimate().completion_perplexity(corpus()) < 0.9 * start
    x = found.double().view(WORDS + 1, -1)
    torch.testing.assert_close(x[-1], x[:-1].sum(0), rtol=0.05, atol=1.0)  # unlocked writers may lose some


def test_all_reduce_over_two_is_one_on_the_joined_batch():
    def joined(count):
        return zip(batches(0, count=count), batches(1, count=count), strict=True)

    found, other = SimulatedFabric(2, seed=0).run([functools.partial(work, AllReduce(), 8)] * 2)
    assert torch.equal(found, other)
    alone = learner()
    for one, two in joined(8):
        parts = [one.data, two.data]
        alone.learn(Batch(_stacked(parts)))
    torch.testing.assert_close(found, alone.replica.values().detach(), rtol=1e-4, atol=5e-3)


def _stacked(parts):
    starts = np.concatenate([parts[0].starts, parts[1].starts[1:] + parts[0].starts[-1]])
    words = np.concatenate([part.words for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    return Corpus(starts, words, counts, parts[0].vocabulary, WORDS)
