"""TRPO's arithmetic: Fisher products and conjugate gradients against dense matrices, and the bound on the KL
divergence on random problems."""

import math

import pytest
import torch

from murmurate.losses.divergence import categorical_kl, gaussian_kl
from murmurate.losses.surrogate import surrogate
from murmurate.losses.trust_region import conjugate_gradient, fisher_product, line_search, natural_step


def draw(generator, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def positive(seed, n):
    """A random symmetric positive definite matrix and a right-hand side."""
    g = torch.Generator().manual_seed(seed)
    root = draw(g, n, n)
    return root @ root.T + 0.1 * torch.eye(n, dtype=torch.float64), draw(g, n)


def test_conjugate_gradient_table():
    """Hestenes and Stiefel by hand: A = diag(1, 3), b = (1, 1): steps of 2 / 4, then of the rest."""
    a, b = torch.tensor([1.0, 3.0]).double(), torch.ones(2).double()
    assert conjugate_gradient(lambda v: a * v, b, iterations=1).tolist() == [0.5, 0.5]
    torch.testing.assert_close(conjugate_gradient(lambda v: a * v, b, iterations=2), 1 / a)


@pytest.mark.parametrize("seed", range(10))
def test_conjugate_gradient_equals_a_dense_solve(seed):
    a, b = positive(seed, 12)
    before = b.clone()
    x = conjugate_gradient(lambda v: a @ v, b, iterations=40, tolerance=1e-24)
    torch.testing.assert_close(x, torch.linalg.solve(a, b), rtol=1e-7, atol=1e-8)
    assert torch.equal(b, before)


def test_it_improves_with_each_iteration_and_stops_at_the_tolerance():
    a, b = positive(3, 30)
    exact, calls = torch.linalg.solve(a, b), []

    def distance(iterations):  # in the norm of A, which conjugate gradients minimise
        error = conjugate_gradient(lambda v: a @ v, b, iterations=iterations) - exact
        return float(error @ (a @ error))

    distances = [distance(k) for k in range(1, 25)]
    assert distances == sorted(distances, reverse=True)

    def counted(v):
        calls.append(1)
        return a @ v

    rough = conjugate_gradient(counted, b, iterations=1000, tolerance=1e-2)
    assert len(calls) < 100
    assert (a @ rough - b).square().sum() <= 1e-2 * b.square().sum()
    assert not conjugate_gradient(counted, torch.zeros(30).double()).any()


class Problem:
    """A random policy net of two layers with a random batch: everything as a function of its vector."""

    def __init__(self, seed, continuous=False):
        g = torch.Generator().manual_seed(seed)
        self.batch, self.inputs, self.hidden, self.actions = 40, 3, 5, 4
        self.sizes = [self.inputs * self.hidden, self.hidden, self.hidden * self.actions, self.actions]
        self.continuous = continuous
        self.seen = draw(g, self.batch, self.inputs)
        self.theta = draw(g, sum(self.sizes))
        self.old = self.outputs(self.theta).detach()
        self.advantage = (draw(g, 1, self.batch) * 10 ** torch.rand(1, generator=g).double()).detach()
        self.taken = torch.randint(4, (self.batch,), generator=g)
        if continuous:
            mean, log_std = self.old.chunk(2, -1)
            self.taken = mean + log_std.exp() * draw(g, self.batch, 2)

    def outputs(self, theta):
        w1, b1, w2, b2 = theta.split(self.sizes)
        h = torch.tanh(self.seen @ w1.view(self.inputs, self.hidden) + b1)
        out = h @ w2.view(self.hidden, self.actions) + b2
        return torch.cat([out[:, :2], 0.3 * out[:, 2:]], -1) if self.continuous else out

    def log_prob(self, outputs):
        if not self.continuous:
            return outputs.log_softmax(-1).gather(-1, self.taken[:, None])[:, 0]
        mean, log_std = outputs.chunk(2, -1)
        return -(0.5 * ((self.taken - mean) / log_std.exp()).square() + log_std).sum(-1)

    def kl(self, theta):
        new = self.outputs(theta)
        if not self.continuous:
            return categorical_kl(self.old, new).mean()
        return gaussian_kl(*self.old.chunk(2, -1), *new.chunk(2, -1)).mean()

    def loss(self, theta):
        return surrogate(
            self.log_prob(self.outputs(theta))[None], self.log_prob(self.old)[None], self.advantage
        )

    def gradient(self):
        x = self.theta.clone().requires_grad_()
        return torch.autograd.grad(self.loss(x), x)[0]

    def fisher(self):
        """E_a[grad log pi grad log pi^T] written out: J^T (Fisher matrix of the outputs) J."""
        jacobian = torch.autograd.functional.jacobian(self.outputs, self.theta)
        total = torch.zeros(len(self.theta), len(self.theta), dtype=torch.float64)
        for j, out in zip(jacobian, self.old, strict=True):
            if self.continuous:
                precision = torch.exp(-2 * out[2:])
                inner = torch.cat([precision, torch.full((2,), 2.0).double()]).diag()
            else:
                pi = out.softmax(-1)
                inner = pi.diag() - pi.outer(pi)
            total += j.T @ inner @ j / self.batch
        return total


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_fisher_products_equal_the_explicit_matrix(seed, continuous):
    problem = Problem(seed, continuous)
    product, matrix = fisher_product(problem.kl, problem.theta), problem.fisher()
    for column in (0, 7, -1):
        v = draw(torch.Generator().manual_seed(seed + column + 1), len(problem.theta))
        torch.testing.assert_close(product(v), matrix @ v, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("continuous", [False, True])
def test_the_step_is_the_natural_gradient(continuous):
    problem = Problem(11, continuous)
    n = len(problem.theta)
    product = fisher_product(problem.kl, problem.theta)
    damped = problem.fisher() + 0.1 * torch.eye(n, dtype=torch.float64)
    g = problem.gradient()
    step = natural_step(lambda v: product(v) + 0.1 * v, g, max_kl=0.01, iterations=200)
    dense = -torch.linalg.solve(damped, g)
    dense *= math.sqrt(2 * 0.01 / float(dense @ damped @ dense))
    torch.testing.assert_close(step, dense, rtol=1e-3, atol=1e-5)
    assert float(step @ damped @ step) / 2 == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize("max_kl", [0.01, 0.2])
def test_the_accepted_step_keeps_the_bound_and_improves_on_100_random_problems(max_kl):
    fractions, divergences = [], []
    for seed in range(100):
        problem = Problem(1000 + seed, continuous=seed % 2 == 1)
        product = fisher_product(problem.kl, problem.theta)
        step = natural_step(
            lambda v, product=product: product(v) + 0.1 * v, problem.gradient(), max_kl=max_kl
        )

        def evaluate(fraction, problem=problem, step=step):
            there = problem.theta + fraction * step
            return float(problem.loss(there)), float(problem.kl(there))

        before = float(problem.loss(problem.theta))
        found = line_search(evaluate, before, max_kl=max_kl)
        there = problem.theta + found.fraction * step
        assert float(problem.kl(there)) <= max_kl
        assert found.fraction > 0
        assert float(problem.loss(there)) < before
        fractions.append(found.fraction)
        divergences.append(found.kl)
    assert min(divergences) > 0.0
    # the bound is not kept by tiny steps; with the larger one the line search has to work
    assert sum(divergences) / 100 > 0.3 * max_kl
    assert max_kl < 0.1 or min(fractions) < 1


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ({1.0: (0.5, 0.009)}, 1.0),
        ({1.0: (0.5, 0.02), 0.8: (0.6, 0.01)}, 0.8),  # the first breaks the bound; the second is on it
        ({1.0: (1.1, 0.001), 0.8: (math.nan, 0.001), 0.64: (0.9, 0.001)}, 0.64),  # not better; NaN
        ({1.0: (1.0, 0.001), 0.8: (1.0, 0.001), 0.64: (0.9, math.nan)}, 0.0),  # never
    ],
)
def test_line_search_table(points, expected):
    rounded = {round(fraction, 6): there for fraction, there in points.items()}
    found = line_search(lambda f: rounded[round(f, 6)], 1.0, max_kl=0.01, backtracks=3)
    assert found.fraction == pytest.approx(expected)
    assert (found.loss, found.kl) == (rounded[round(expected, 6)] if expected else (1.0, 0.0))


def test_no_gradient_and_no_curvature_are_no_step():
    zero, one = torch.zeros(3).double(), torch.ones(3).double()
    assert not natural_step(lambda v: v, zero, max_kl=0.01).any()
    assert not natural_step(lambda v: -v, one, max_kl=0.01).any()


def test_a_step_too_long_for_a_number_is_none():
    steep = torch.full((3,), 1e19)
    assert natural_step(lambda v: 1e-20 * v, steep, max_kl=0.01).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: conjugate_gradient(lambda v: v, x[None]), "b must have 1"),
        (lambda x: conjugate_gradient(lambda v: v, x, iterations=0), "iterations"),
        (lambda x: natural_step(lambda v: v, x, max_kl=0.0), "max_kl"),
        (lambda x: line_search(lambda f: (0.0, 0.0), 0.0, max_kl=-1.0), "max_kl"),
        (lambda x: line_search(lambda f: (0.0, 0.0), 0.0, max_kl=1.0, backtracks=0), "backtracks"),
        (lambda x: line_search(lambda f: (0.0, 0.0), 0.0, max_kl=1.0, shrink=1.0), "shrink"),
        (lambda x: fisher_product(lambda v: v.sum(), x[None]), "theta must have 1"),
        (lambda x: fisher_product(lambda v: v.square().sum(), x)(x[:1]), "v must be shaped"),
    ],
)
def test_wrong_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call(torch.ones(3))
