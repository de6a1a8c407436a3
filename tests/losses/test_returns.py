"""Advantages and returns: tables, the sum-of-products oracle, and the relations between the two."""

import pytest
import torch

from murmurate.losses.returns import generalized_advantages
from oracles import returns as oracle

F, T = False, True


def column(*values):
    """One simulator's [T, 1] column."""
    x = torch.tensor(values)
    return (x if x.dtype == torch.bool else x.double()).unsqueeze(1)


def n_step_returns(r, *ends, discount):
    """Advantages with lambda = 1 are returns less values, and those of values of 0 are the returns."""
    return generalized_advantages(r, torch.zeros_like(r), *ends, discount=discount, lambda_=1.0)


# rewards, terminated, truncated, last value, truncated values, discount, returns; by hand.
TABLE = {
    "bootstraps at the end": ([1, 2, 3], [F, F, F], [F, F, F], 8, [0, 0, 0], 0.5, [3.75, 5.5, 7.0]),
    "terminated: no bootstrap": ([1, 2, 3], [F, F, T], [F, F, F], 8, [0, 0, 0], 0.5, [2.75, 3.5, 3.0]),
    "truncated: final observation": ([1, 2, 3], [F, F, F], [F, F, T], 8, [0, 0, 4], 0.5, [3.25, 4.5, 5.0]),
    "terminated inside: restarts": ([1, 2, 3], [F, T, F], [F, F, F], 8, [0, 0, 0], 0.5, [2.0, 2.0, 7.0]),
    "truncated inside: restarts": ([1, 2, 3], [F, F, F], [F, T, F], 8, [0, 6, 0], 0.5, [3.5, 5.0, 7.0]),
    "both at once: terminated": ([1, 2, 3], [F, T, F], [F, T, F], 8, [0, 6, 0], 0.5, [2.0, 2.0, 7.0]),
    "value unread elsewhere": ([1, 2, 3], [F, F, F], [F, F, F], 8, [9, 9, 9], 0.5, [3.75, 5.5, 7.0]),
    "one step": ([1], [F], [F], 8, [0], 0.5, [5.0]),
    "discount 0": ([1, 2, 3], [F, F, F], [F, F, T], 8, [0, 0, 4], 0.0, [1.0, 2.0, 3.0]),
    "discount 1": ([1, 2, 3], [F, F, F], [F, F, F], 8, [0, 0, 0], 1.0, [14.0, 13.0, 11.0]),
}


@pytest.mark.parametrize("case", TABLE)
def test_n_step_returns_table(case):
    r, terminated, truncated, last, cut, discount, expected = TABLE[case]
    g = n_step_returns(
        column(*r),
        column(*terminated),
        column(*truncated),
        torch.tensor([last]).double(),
        column(*cut),
        discount=discount,
    )
    assert g.squeeze(1).tolist() == expected


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        # delta = r + V'/2 - V = [1 + 5 - 4, 2 + 3 - 10, 3 + 4 - 6] = [2, -5, 1]; weight 1/4 a step.
        ([F, F, F], [F, F, F], [2 - 5 / 4 + 1 / 16, -5 + 1 / 4, 1.0]),
        # Terminated at 1: delta_1 = 2 - 10 = -8.
        ([F, T, F], [F, F, F], [2 - 8 / 4, -8.0, 1.0]),
        # Truncated at 1 where the final observation is worth 20: delta_1 = 2 + 10 - 10 = 2.
        ([F, F, F], [F, T, F], [2 + 2 / 4, 2.0, 1.0]),
    ],
)
def test_generalized_advantages_table(terminated, truncated, expected):
    a = generalized_advantages(
        column(1, 2, 3),
        column(4, 10, 6),
        column(*terminated),
        column(*truncated),
        torch.tensor([8.0]).double(),
        column(0, 20, 0),
        discount=0.5,
        lambda_=0.5,
    )
    assert a.squeeze(1).tolist() == expected


def rollout(seed, steps=7, batch=11):
    """A rollout in float64 in which a third of the steps end somehow, some in both ways."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    terminated = torch.rand(steps, batch, generator=generator) < 0.2
    truncated = torch.rand(steps, batch, generator=generator) < 0.2
    return draw(steps, batch), draw(steps, batch), terminated, truncated, draw(batch), draw(steps, batch)


@pytest.mark.parametrize("seed", range(10))
def test_n_step_returns_equal_the_oracle(seed):
    r, _, terminated, truncated, last, cut = rollout(seed)
    g = n_step_returns(r, terminated, truncated, last, cut, discount=0.9)
    lists = [x.tolist() for x in (r, terminated, truncated, last, cut)]
    expected = torch.tensor(oracle.n_step_returns(*lists, 0.9), dtype=torch.float64)
    torch.testing.assert_close(g, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_generalized_advantages_equal_the_oracle(seed, lambda_):
    r, v, terminated, truncated, last, cut = rollout(seed)
    a = generalized_advantages(r, v, terminated, truncated, last, cut, discount=0.9, lambda_=lambda_)
    lists = [x.tolist() for x in (r, v, terminated, truncated, last, cut)]
    expected = torch.tensor(oracle.generalized_advantages(*lists, 0.9, lambda_), dtype=torch.float64)
    torch.testing.assert_close(a, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_lambda_one_is_the_return_and_lambda_zero_the_error_of_one_step(seed):
    r, v, terminated, truncated, last, cut = rollout(seed)
    ends = (terminated, truncated, last, cut)
    far = generalized_advantages(r, v, *ends, discount=0.97, lambda_=1.0)
    torch.testing.assert_close(far + v, n_step_returns(r, *ends, discount=0.97), rtol=1e-12, atol=1e-12)

    near = generalized_advantages(r, v, *ends, discount=0.97, lambda_=0.0)
    following = torch.cat([v[1:], last[None]])
    following = torch.where(truncated, cut, following).masked_fill(terminated, 0.0)
    torch.testing.assert_close(near, r + 0.97 * following - v, rtol=1e-12, atol=1e-12)


def test_returns_are_constants():
    r, v, terminated, truncated, last, cut = rollout(0)
    for x in (r, v, last, cut):
        x.requires_grad_()
    ends = (terminated, truncated, last, cut)
    assert not generalized_advantages(r, v, *ends, discount=0.9, lambda_=0.9).requires_grad


def test_values_are_read_only_where_truncated():
    r, v, terminated, truncated, last, cut = rollout(3)
    poisoned = torch.where(truncated & ~terminated, cut, float("nan"))
    ends = (terminated, truncated, last)
    assert torch.equal(
        generalized_advantages(r, v, *ends, poisoned, discount=0.9, lambda_=0.9),
        generalized_advantages(r, v, *ends, cut, discount=0.9, lambda_=0.9),
    )


def test_arguments_are_left_as_they_were():
    arguments = rollout(1)
    before = [x.clone() for x in arguments]
    r, v, *ends = arguments
    generalized_advantages(r, v, *ends, discount=0.9, lambda_=0.9)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


def test_no_values_of_final_observations_is_a_promise_that_is_kept():
    r, v, terminated, truncated, last, _ = rollout(2)
    never = torch.zeros_like(truncated)
    zeros = torch.zeros_like(r)
    assert torch.equal(
        generalized_advantages(r, v, terminated, never, last, discount=0.9, lambda_=0.9),
        generalized_advantages(r, v, terminated, never, last, zeros, discount=0.9, lambda_=0.9),
    )
    with pytest.raises(ValueError, match="truncated_value"):
        generalized_advantages(r, v, terminated, truncated, last, discount=0.9, lambda_=0.9)


@pytest.mark.parametrize("wrong", ["rank", "terminated", "bool", "last", "cut", "discount", "v", "lambda"])
def test_bad_arguments_are_named(wrong):
    r, v, terminated, truncated, last, cut = rollout(0)
    discount, lambda_ = 0.9, 0.9
    if wrong == "rank":
        r, name = r[0], "r_t"
    elif wrong == "terminated":
        terminated, name = terminated[:, :1], "terminated_t"
    elif wrong == "bool":
        truncated, name = truncated.float(), "truncated_t"
    elif wrong == "last":
        last, name = last[None], "last_value"
    elif wrong == "cut":
        cut, name = cut[:1], "truncated_value"
    elif wrong == "discount":
        discount, name = 1.5, "discount"
    elif wrong == "v":
        v, name = v[:1], "v_t"
    else:
        lambda_, name = -0.1, "lambda_"
    with pytest.raises(ValueError, match=name):
        generalized_advantages(r, v, terminated, truncated, last, cut, discount=discount, lambda_=lambda_)
