"""The conjugate-exponential family: one learner, whatever the model.

A natural-gradient step on all examples is the exact coordinate update; bounds do not fall; every strategy
carries it.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from laws.centre import finish, is_centre, serve_until
from murmurate.datasets.generated import generate
from murmurate.datasets.table import Table
from murmurate.fabric.processes.fabric import run_members
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.losses.mixture import divergence
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.replicator.replicator import Replicator
from murmurate.spec import Batch, EnvSpec
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.dpsgd import DPSGD
from murmurate.strategies.gala import GALA
from murmurate.strategies.hogwild import Hogwild
from murmurate.workloads.mixture_model import MixtureModel
from murmurate.workloads.topic_model import TopicModel

K, D, ROWS = 4, 3, 1200
CPU = torch.device("cpu")
FULL_STEPS = {"step_rule": "robbins-monro", "forgetting": 0.0}  # eta is 1
MODELS = {
    kind: MixtureModel(components=K, batch=60, covariance=kind, validate_every=0)
    for kind in ("full", "diagonal")
}


@functools.lru_cache
def table(rows=ROWS, seed=0):
    """Rows of four well-shaped clusters, far from 0."""
    random = np.random.default_rng(3)
    means = random.normal(0, 4, (K, D)) + np.array([300.0, 0.0, -20.0])
    shapes = random.normal(0, 0.7, (K, D, D)) + 0.5 * np.eye(D)
    draw = np.random.default_rng([4, seed])
    which = draw.choice(K, rows, p=[0.4, 0.3, 0.2, 0.1])
    return Table(means[which] + np.einsum("nij,nj->ni", shapes[which], draw.normal(size=(rows, D))))


@functools.lru_cache
def wide():
    """Rows of ten clusters in five columns: of ten components a message holds nine."""
    random = np.random.default_rng(5)
    which = random.integers(0, 10, ROWS)
    return Table(random.normal(0, 6, (10, 5))[which] + random.normal(size=(ROWS, 5)))


def learner(model, replicate=Replica, seed=0, rows=table):
    spec = EnvSpec("table", (rows().values.shape[1],), torch.float64, 0, examples=ROWS)
    return model.build(Context(spec, replicate, seed, examples=rows()))


def variant(kind, **changes):
    return MixtureModel(**{**vars(MODELS[kind]), **changes})


def topics(replicate=Replica, **changes):
    corpus = generate(documents=150, vocabulary=60, topics=3, mean_length=40, seed=1, topic_mass=6.0).corpus
    spec = EnvSpec("corpus", (60,), torch.int32, 0, examples=150)
    model = TopicModel(topics=3, batch=150, alpha=0.3, prior=0.1, validate_every=0, **changes)
    return model.build(Context(spec, replicate, 0, examples=corpus)), corpus


def batches(rank=0, count=20, size=60, rows=table):
    order = np.random.default_rng(rank).permutation(ROWS)
    for number in range(count):
        yield Batch(rows().select(order[(number * size + np.arange(size)) % ROWS]), env_steps=size)


# -- batch variational inference, as Bishop prints it --------------------------------------------------------


class Bishop:
    """Equations 10.46 to 10.63 in numpy, row by row and component by component, in the data's coordinates."""

    def __init__(self, it):
        self.x = table().values
        self.full = it.config.covariance == "full"
        self.m_0, self.w_0 = it.centre.numpy(), it.scatter.numpy()  # its inverse
        self.alpha_0, self.beta_0, self.nu_0 = 1 / K, 1.0, float(D)

    def update(self, r):
        """M-step: (alpha, beta, nu, m, W^-1), given responsibilities [n, K]."""
        q = []
        for k in range(K):
            n = r[:, k].sum()
            mean = (r[:, k, None] * self.x).sum(0) / n
            away = self.x - mean
            spread = (r[:, k, None, None] * away[:, :, None] * away[:, None]).sum(0) / n
            beta = self.beta_0 + n
            moved = np.outer(mean - self.m_0, mean - self.m_0)
            more = n * spread + self.beta_0 * n / beta * moved
            inverse = self.w_0 + (more if self.full else np.diag(more))
            m = (self.beta_0 * self.m_0 + n * mean) / beta
            q.append((self.alpha_0 + n, beta, self.nu_0 + n, m, inverse))
        return q

    def responsibilities(self, q):
        total = sum(alpha for alpha, *_ in q)
        log = np.empty((len(self.x), K))
        for k, (alpha, beta, nu, m, inverse) in enumerate(q):
            if self.full:
                freedoms, precision = [nu - d for d in range(D)], np.linalg.inv(inverse)
                log_w = -np.linalg.slogdet(inverse)[1]
            else:
                freedoms, precision = [nu] * D, np.diag(1 / inverse)
                log_w = -np.log(inverse).sum()
            log_precision = sum(_digamma(f / 2) for f in freedoms) + D * math.log(2) + log_w
            away = self.x - m
            square = np.einsum("ni,ij,nj->n", away, precision, away)
            log[:, k] = _digamma(alpha) - _digamma(total) + 0.5 * (log_precision - D / beta - nu * square)
        log -= log.max(1, keepdims=True)
        r = np.exp(log)
        return r / r.sum(1, keepdims=True)


def _digamma(x):
    return float(torch.digamma(torch.tensor(x, dtype=torch.float64)))


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_full_step_on_all_rows_is_the_exact_coordinate_update(kind):
    """G = n and eta = 1: equation 50 is equation 46."""
    it = learner(variant(kind, **FULL_STEPS))
    bishop, step = Bishop(it.model), Batch(table())
    for _ in range(3):
        found = it.estimate()
        before = [tuple(part[k].numpy() for part in _bishops(found)) for k in range(K)]
        r = bishop.responsibilities(before)
        np.testing.assert_allclose(found.responsibilities(table()).numpy(), r, atol=1e-8)
        wanted = bishop.update(r)
        it.learn(step)
        for k in range(K):
            for part, right in zip(_bishops(it.estimate()), wanted[k], strict=True):
                np.testing.assert_allclose(part[k].numpy(), right, rtol=1e-9, atol=1e-8)


def _bishops(found):
    q = found.posterior
    return q.alpha, q.beta, q.nu, found.means, q.scatter


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_it_steps_to_exactly_what_its_statistics_are(kind):
    """To 1e-10: x after a step of eta = 1 is n / G sum E[t], whatever it was."""
    it = learner(variant(kind, **FULL_STEPS))
    before = it.values().clone()
    seen = it.model.expected(before, 1.0, table())
    rows, _ = it.model.statistics(seen, table(), 1.0)
    it.learn(Batch(table()))
    torch.testing.assert_close(it.values(), rows.values, rtol=1e-10, atol=1e-10)
    assert (it.values() - before).abs().max() > 0.1


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("forgetting", [0.0, 0.5])
def test_the_bound_of_a_mixture_does_not_fall(kind, forgetting):
    """Whatever the step, on all rows each goes up the bound; there it stands still in the end."""
    it = learner(variant(kind, init="random", step_rule="robbins-monro", forgetting=forgetting, delay=1.0))
    bounds = [it.elbo(table())]
    for _ in range(25):
        it.learn(Batch(table()))
        bounds.append(it.elbo(table()))
    rises = np.diff(bounds)
    assert (rises > -1e-8 * abs(bounds[0])).all()
    assert bounds[-1] > bounds[0] + 10


def test_the_bound_of_topics_does_not_fall():
    it, corpus = topics(forgetting=0.0, iterations=500, tolerance=1e-6)
    bounds = [it.elbo(corpus)]
    for _ in range(15):
        it.learn(Batch(corpus))
        bounds.append(it.elbo(corpus))
    assert (np.diff(bounds) > -1e-6 * abs(bounds[0])).all()
    assert bounds[-1] > bounds[0] + 10


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_the_bound_of_one_component_is_the_evidence(kind):
    """There nothing is hidden, so the bound is tight: the sum of what each row was foretold with."""
    it = learner(variant(kind, components=1, **FULL_STEPS))
    few = table().select(range(15))
    it.examples = len(few)
    it.learn(Batch(few))
    nothing = it.model.estimate(torch.zeros_like(it.values()))
    assert float(divergence(nothing.posterior, it.model.prior)) == pytest.approx(0, abs=1e-9)
    evidence, seen = 0.0, torch.zeros_like(it.values())
    for row in range(len(few)):
        one = few.select([row])
        evidence += float(it.model.estimate(seen).log_likelihood(one))
        rows, _ = it.model.statistics(it.model.expected(seen, 1.0, one), one, 1.0)
        seen += rows.values
    assert it.elbo(few) == pytest.approx(evidence, rel=1e-9)


# -- beside scikit-learn -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "theirs"), [("full", "full"), ("diagonal", "diag")])
def test_held_out_rows_are_as_likely_as_under_scikit_learns(kind, theirs):
    mixture = pytest.importorskip("sklearn.mixture", reason="scikit-learn is what it is compared with")
    other = mixture.BayesianGaussianMixture(
        n_components=K,
        covariance_type=theirs,
        weight_concentration_prior_type="dirichlet_distribution",
        max_iter=500,
        random_state=0,
    ).fit(table().values)
    it = learner(MODELS[kind])
    for batch in batches(count=200):
        it.learn(batch)
    held = table(800, seed=1)
    assert float(it.estimate().elbo_per_row(held).mean()) == pytest.approx(other.score(held.values), rel=0.02)
    assert float(it.estimate().log_likelihood(held).mean()) == pytest.approx(
        other.score(held.values), rel=0.02
    )
    np.testing.assert_allclose(sorted(it.estimate().weights), sorted(other.weights_), atol=0.03)


# -- strategies ----------------------------------------------------------------------------------------------


def work(strategy, count, fabric, model=MODELS["full"], rows=table):
    torch.set_num_threads(1)
    replicator = Replicator(strategy, fabric)
    it = learner(model, replicator.replicate, rows=rows)
    # all begin together, as in a run: the large first steps of one that comes later would undo the others'
    fabric.channel("begin", torch.zeros(1)).gather(torch.zeros(1))
    if strategy.centre and is_centre(fabric):
        serve_until(replicator, fabric)
        return replicator.consensus()["mixture"]
    for batch in batches(fabric.rank, count=count, rows=rows):
        it.learn(batch)
    if strategy.centre:
        finish(replicator, fabric)
    else:
        replicator.publish()
        fabric.channel("end", torch.zeros(1)).mean_(torch.zeros(1))
    return replicator.consensus()["mixture"]


@pytest.mark.parametrize(
    "strategy", [Hogwild(), AllReduce(), GALA(), DPSGD(threads=1, local_updates=3)], ids=lambda s: s.name
)
def test_replicas_on_real_processes_find_components_together(strategy):
    size = 2 + strategy.centre
    found = run_members(size, [functools.partial(work, strategy, 60)] * size)[0]
    alone = learner(MODELS["full"])
    for batch in batches(count=120):
        alone.learn(batch)
    it = learner(MODELS["full"])
    with torch.no_grad():
        it.replica.params.copy_(found)
    held = table(800, seed=1)
    wanted = float(alone.estimate().log_likelihood(held).mean())
    assert float(it.estimate().log_likelihood(held).mean()) == pytest.approx(wanted, rel=0.02)
    assert float(it.values()[:, 0].sum()) == pytest.approx(ROWS, rel=0.05)  # all rows have a component


def test_pushes_of_nearly_all_components_are_taken():
    """Their messages hold rows, of float64 as the vector is."""
    model = MixtureModel(components=10, batch=60, init="random", validate_every=0)
    part = functools.partial(work, DPSGD(threads=1, local_updates=3), 60, model=model, rows=wide)
    found, *_ = SimulatedFabric(3, seed=0).run([part] * 3)
    it, alone = (learner(model, rows=wide) for _ in range(2))
    start = float(it.estimate().log_likelihood(wide()).mean())
    for batch in batches(count=120, rows=wide):
        alone.learn(batch)
    with torch.no_grad():
        it.replica.params.copy_(found)
    wanted = float(alone.estimate().log_likelihood(wide()).mean())
    assert wanted > start + 0.1
    assert float(it.estimate().log_likelihood(wide()).mean()) == pytest.approx(wanted, rel=0.02)
    assert float(it.values()[:, 0].sum()) == pytest.approx(ROWS, rel=0.05)


def test_all_reduce_over_two_is_one_on_the_joined_batch():
    found, other = SimulatedFabric(2, seed=0).run([functools.partial(work, AllReduce(), 15)] * 2)
    assert torch.equal(found, other)
    alone = learner(MODELS["full"])
    for one, two in zip(batches(0, 15), batches(1, 15), strict=True):
        alone.learn(Batch(Table(np.concatenate([one.data.values, two.data.values]))))
    torch.testing.assert_close(found, alone.replica.values().detach(), rtol=1e-9, atol=1e-7)
