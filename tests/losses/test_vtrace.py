"""V-trace: a table with rlax's figures, the sum-of-products oracle, and what it is when nothing lags."""

import pytest
import torch

from murmurate.losses.policy import policy_gradient
from murmurate.losses.returns import generalized_advantages
from murmurate.losses.vtrace import vtrace
from oracles import vtrace as oracle

BARS = {"rho_bar": 1.0, "c_bar": 1.0, "policy_rho_bar": 1.0}


def test_table_of_rlax():
    """The figures of ``rlax/_src/vtrace_test.py``, setUp (rlax 0.1.9, Apache 2.0), to the relative 1e-3 that
    its own test allows: all bars 1 (the 5 of ``clip_pg_rho_threshold`` there is not passed on), lambda 1. Its
    discounts differ by step; a 0 is an end."""
    behaviour = torch.tensor(
        [
            [[8.9, 0.7], [5.0, 1.0], [0.6, 0.1], [-0.9, -0.1]],
            [[0.3, -5.0], [1.0, -8.0], [0.3, 1.7], [4.7, 3.3]],
        ]
    )
    learner = torch.tensor(
        [[[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]], [[1.0, 0.9], [1.0, -1.0], [-4.3, 8.7], [0.8, 0.3]]]
    )
    action = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 1]])
    log_rho = (learner.log_softmax(-1) - behaviour.log_softmax(-1)).gather(-1, action[..., None])[..., 0]
    reward = torch.tensor([[-1.3, -1.3, 2.3, 42.0], [1.3, 5.3, -3.3, -5.0]])
    discount = torch.tensor([[0.0, 0.89, 0.85, 0.99], [0.88, 1.0, 0.83, 0.95]])
    value = torch.tensor([[2.1, 1.1, -3.1, 0.0], [3.1, 0.1, -1.1, 7.4]])
    never = torch.zeros(4, 2, dtype=torch.bool)
    # batches are its first dimension, and our second
    target, advantage = vtrace(
        log_rho.exp().T,
        reward.T,
        value.T,
        never,
        never,
        torch.tensor([8.4, -1.2]),
        discount=discount.T,
        **BARS,
    )
    errors = [[-1.6155143, -3.4973226, 1.8670533, 50.316002], [1.4662437, 3.6116405, -8.3327293e-5, -13.54]]
    gradients = [
        [-1.6155143, -3.4973226, 1.8670534, 50.316002],
        [1.4662433, 3.6116405, -8.3369283e-05, -13.54],
    ]
    torch.testing.assert_close((target - value.T).T, torch.tensor(errors), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(advantage.T, torch.tensor(gradients), rtol=1e-3, atol=1e-6)


def test_table_by_hand():
    """One simulator, discount 1/2: a TD error counts by its rho (1/2, 1, 1), a later one by each c before."""
    column = [torch.tensor(x, dtype=torch.float64)[:, None] for x in ([0.5, 2.0, 4.0], [1, 2, 3], [4, 2, 6])]
    never = torch.zeros(3, 1, dtype=torch.bool)
    target, advantage = vtrace(*column, never, never, torch.tensor([8.0]).double(), discount=0.5)
    # errors r + V'/2 - V: [-2, 3, 1]; v - V: [-1 + 3.5 / 4, 3 + 1 / 2, 1]
    assert (target - column[2]).flatten().tolist() == [-0.125, 3.5, 1.0]
    # r + v'/2 - V: [1 + 5.5 / 2 - 4, 2 + 7 / 2 - 2, 3 + 4 - 6], the first by 1/2
    assert advantage.flatten().tolist() == [-0.125, 3.5, 1.0]
    ended = torch.tensor([[False], [True], [False]])
    target, _ = vtrace(*column, ended, never, torch.tensor([8.0]).double(), discount=0.5)
    assert (target - column[2]).flatten().tolist() == [-1.0, 0.0, 1.0], "nothing passes a terminated step"
    cut = torch.tensor([[0.0], [20.0], [0.0]]).double()
    target, _ = vtrace(*column, never, ended, torch.tensor([8.0]).double(), cut, discount=0.5)
    assert (target - column[2]).flatten().tolist() == [1.5, 10.0, 1.0], "and its value passes a truncated one"


def rollout(seed, steps=7, batch=11):
    """A rollout in float64 in which a third of the steps end somehow, some in both ways."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    terminated = torch.rand(steps, batch, generator=generator) < 0.2
    truncated = torch.rand(steps, batch, generator=generator) < 0.2
    ends = (terminated, truncated, draw(batch), draw(steps, batch))
    return draw(steps, batch).exp(), draw(steps, batch), draw(steps, batch), ends


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "bars",
    [
        BARS,
        {"rho_bar": 2.0, "c_bar": 0.8, "policy_rho_bar": 5.0},
        {"rho_bar": float("inf"), "c_bar": 1.5, "policy_rho_bar": float("inf")},
        {"rho_bar": 0.5, "c_bar": 0.0, "policy_rho_bar": 0.5},
    ],
    ids=["1", "several", "unbounded", "no trace"],
)
def test_it_equals_the_sum_of_products(seed, lambda_, bars):
    rho, r, v, ends = rollout(seed)
    result = vtrace(rho, r, v, *ends, discount=0.9, lambda_=lambda_, **bars)
    lists = [x.tolist() for x in (rho, r, v, *ends)]
    expected = oracle.vtrace(*lists, 0.9, lambda_=lambda_, **bars)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, torch.tensor(other, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_on_its_own_steps_it_is_the_generalized_advantage(seed, lambda_):
    """With lambda 1 the n-step return, and its advantage."""
    _, r, v, ends = rollout(seed)
    target, advantage = vtrace(torch.ones_like(r), r, v, *ends, discount=0.9, lambda_=lambda_)
    expected = generalized_advantages(r, v, *ends, discount=0.9, lambda_=lambda_)
    torch.testing.assert_close(advantage, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(target, v + expected, rtol=1e-12, atol=1e-12)


def test_an_action_that_the_policy_no_longer_takes_teaches_nothing_and_lets_nothing_pass():
    rho, r, v, ends = rollout(0)
    never = torch.zeros_like(ends[0])
    rho = rho.index_fill(0, torch.tensor([3]), 0.0)
    ends = (never, never, *ends[2:])
    target, advantage = vtrace(rho, r, v, *ends, discount=0.9)
    torch.testing.assert_close(target[3], v[3], rtol=0, atol=0)
    assert (advantage[3] == 0).all()
    later = (torch.arange(7.0)[:, None] > 3).double()
    other, _ = vtrace(rho, r + later, v, *ends, discount=0.9)
    assert torch.equal(target[:4], other[:4])
    assert not torch.equal(target[4:], other[4:])


@pytest.mark.parametrize("at", [0.5, 1.0, 2.0])
def test_targets_and_advantages_are_constants_also_at_the_clip(at):
    """So the gradient of the policy is that of log pi alone, whether rho is below, at or beyond its bar."""
    rho, r, v, ends = rollout(0)
    log_prob = torch.full_like(r, -1.0, requires_grad=True)
    rho = at * (log_prob + 1.0).exp()  # it depends on the policy
    for x in (r, v, *ends[2:]):
        x.requires_grad_()
    target, advantage = vtrace(rho, r, v, *ends, discount=0.9)
    assert not target.requires_grad
    assert not advantage.requires_grad
    (gradient,) = torch.autograd.grad(policy_gradient(log_prob, advantage), log_prob)
    torch.testing.assert_close(gradient, -advantage / r.numel())


def test_values_are_read_only_where_truncated_and_arguments_are_left_as_they_were():
    rho, r, v, (terminated, truncated, last, cut) = rollout(3)
    poisoned = torch.where(truncated & ~terminated, cut, float("nan"))
    arguments = (rho, r, v, terminated, truncated, last, cut)
    before = [x.clone() for x in arguments]
    one = vtrace(*arguments, discount=0.9)
    other = vtrace(*arguments[:-1], poisoned, discount=0.9)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


@pytest.mark.parametrize(
    ("name", "change"),
    {
        "r_t": {"r": torch.zeros(7)},
        "rho_t": {"rho": torch.ones(7, 1)},
        "v_t": {"v": torch.ones(6, 11)},
        "terminated_t": {"terminated": torch.zeros(7, 11)},
        "last_value": {"last": torch.zeros(7, 11)},
        "truncated_value": {"cut": None},
        "discount": {"discount": 1.5},
        "lambda_": {"lambda_": -0.1},
        "rho_bar": {"rho_bar": -1.0},
        "c_bar": {"c_bar": float("nan")},
        "policy_rho_bar": {"policy_rho_bar": -0.5},
    }.items(),
)
def test_bad_arguments_are_named(name, change):
    rho, r, v, (terminated, truncated, last, cut) = rollout(0)
    given = {"rho": rho, "r": r, "v": v, "terminated": terminated, "truncated": truncated, "last": last}
    given |= {"cut": cut, "discount": 0.9, **change}
    tensors = [given.pop(key) for key in ("rho", "r", "v", "terminated", "truncated", "last", "cut")]
    with pytest.raises(ValueError, match=name):
        vtrace(*tensors, **given)
