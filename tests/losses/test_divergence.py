"""KL divergences against tables, enumerated and integrated distributions, and numerical gradients."""

import math

import pytest
import torch

from murmurate.losses.divergence import categorical_kl, gaussian_kl
from oracles import policy
from oracles import trust_region as oracle

INF = math.inf


def draw(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("p", "q", "kl"),
    [
        ([0.0, 0.0], [5.0, 5.0], 0.0),  # the same distribution from other logits
        ([0.0, 0.0], [0.0, math.log(3)], 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
        ([0.0, -INF], [0.0, 0.0], math.log(2)),  # p never takes the second action
        ([0.0, -INF], [0.0, -INF], 0.0),
        ([0.0, 0.0], [0.0, -INF], INF),
        ([1e4, 0.0], [0.0, 1e4], 1e4),  # no overflow
    ],
)
def test_categorical_table(p, q, kl):
    found = categorical_kl(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64))
    assert found.item() == pytest.approx(kl, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("mean_p", "log_std_p", "mean_q", "log_std_q", "kl"),
    [
        ([0.0], [0.0], [0.0], [0.0], 0.0),
        ([0.0], [0.0], [2.0], [0.0], 2.0),
        ([0.0], [0.0], [0.0], [math.log(2)], math.log(2) + 1 / 8 - 1 / 2),
        ([1.0, 0.0], [0.0, math.log(2)], [0.0, 0.0], [0.0, 0.0], 0.5 + 2 - math.log(2) - 0.5),
    ],
)
def test_gaussian_table(mean_p, log_std_p, mean_q, log_std_q, kl):
    arguments = [torch.tensor(x, dtype=torch.float64) for x in (mean_p, log_std_p, mean_q, log_std_q)]
    assert gaussian_kl(*arguments).item() == pytest.approx(kl, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_both_equal_the_oracles(seed):
    p, q = 2 * draw(seed, 4, 5), 2 * draw(seed + 10, 4, 5)
    kl = categorical_kl(p, q)
    for b in range(4):
        expected = oracle.categorical_kl(policy.categorical(p[b].tolist()), policy.categorical(q[b].tolist()))
        assert kl[b].item() == pytest.approx(expected, rel=1e-12)
    mean_p, log_std_p, mean_q, log_std_q = (0.2 * draw(seed + i, 2, 3) for i in (20, 30, 40, 50))
    kl = gaussian_kl(mean_p, log_std_p, mean_q, log_std_q)
    for b in range(2):
        lists = [x[b].tolist() for x in (mean_p, log_std_p.exp(), mean_q, log_std_q.exp())]
        assert kl[b].item() == pytest.approx(oracle.gaussian_kl(*lists), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_at_least_zero_and_close_policies_are_told_apart_in_float32(seed):
    p = draw(seed, 100, 6)
    assert (categorical_kl(p, draw(seed + 1, 100, 6)) > 0).all()
    mean, log_std, shift = draw(seed, 50, 3), draw(seed + 2, 50, 3), 1e-3 * draw(seed + 3, 50, 3)
    arguments = (mean, log_std, mean + shift, log_std + shift)
    exact = gaussian_kl(*arguments)
    assert (exact > 0).all()
    single = gaussian_kl(*(x.float() for x in arguments))
    torch.testing.assert_close(single.double(), exact, rtol=2e-2, atol=1e-9)


def test_gradients_of_first_and_second_order():
    p, q = draw(0, 2, 4), draw(1, 2, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: categorical_kl(p, x), q)
    assert torch.autograd.gradgradcheck(lambda x: categorical_kl(p, x), q)
    mean_p, log_std_p = draw(2, 2, 3), 0.3 * draw(3, 2, 3)
    mean_q, log_std_q = draw(4, 2, 3).requires_grad_(), (0.3 * draw(5, 2, 3)).requires_grad_()

    def of_gaussians(mean, log_std):
        return gaussian_kl(mean_p, log_std_p, mean, log_std)

    assert torch.autograd.gradcheck(of_gaussians, (mean_q, log_std_q))
    assert torch.autograd.gradgradcheck(of_gaussians, (mean_q, log_std_q))


def test_it_is_flat_at_the_policy_itself_and_its_hessian_there_is_the_fisher_matrix():
    z = draw(6, 4)
    kl = lambda x: categorical_kl(z, x)  # noqa: E731
    assert torch.autograd.functional.jacobian(kl, z).abs().max() < 1e-15
    pi = z.softmax(-1)
    # E[grad log pi grad log pi^T] = diag(pi) - pi pi^T
    torch.testing.assert_close(torch.autograd.functional.hessian(kl, z), pi.diag() - pi.outer(pi))


def test_forbidden_actions_get_no_gradient():
    p = torch.tensor([0.3, -INF, -0.2], dtype=torch.float64)
    q = torch.tensor([0.1, -INF, 0.4], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(categorical_kl(p, q), q)
    assert gradient[1] == 0
    expected = q.detach().softmax(-1) - p.softmax(-1)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: categorical_kl(torch.zeros(3, 2), torch.zeros(3, 4)), "logits_q"),
        (lambda: gaussian_kl(*[torch.zeros(3, 2)] * 3, torch.zeros(2)), "log_std_q"),
        (lambda: gaussian_kl(*[torch.zeros(())] * 4), "mean_p"),
    ],
)
def test_wrong_shapes_are_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()
