"""Regret matching and ARM's targets: tables, the thesis's formulas as loops, exact CFR+ on small games."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from losses.regret_games import ALIASED_CHAIN, KUHN, Game, counterfactual_regrets, tabular_arm
from murmurate.losses.regret import (
    cumulative_target,
    importance_weights,
    regret_matching,
    sequence_returns,
)


@pytest.mark.parametrize(
    ("advantage", "policy"),
    [
        ([3.0, 1.0, -2.0], [0.75, 0.25, 0.0]),
        ([0.0, 0.0], [0.5, 0.5]),
        ([-1.0, -5.0, -2.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
        ([-1.0, 1e-30, -2.0], [0.0, 1.0, 0.0]),
        ([7.0], [1.0]),
    ],
)
def test_regret_matching_is_in_proportion_to_positive_advantages(
    advantage: list[float], policy: list[float]
) -> None:
    torch.testing.assert_close(regret_matching(torch.tensor(advantage)), torch.tensor(policy))
    stacked = regret_matching(torch.tensor([[advantage, advantage]]))
    torch.testing.assert_close(stacked, torch.tensor([[policy, policy]]))


def test_advantages_below_the_smallest_normal_number_also_give_probabilities() -> None:
    torch.set_flush_denormal(False)  # another test may have left it on
    advantage = torch.tensor([1e-39, 3e-39])
    torch.testing.assert_close(regret_matching(advantage), torch.tensor([0.25, 0.75]), rtol=1e-3, atol=0)


def test_weights_are_truncated() -> None:
    pi, mu = torch.tensor([[0.9, 0.2, 0.0]]), torch.tensor([[0.3, 0.4, 0.5]])
    torch.testing.assert_close(importance_weights(pi, mu, clip=1.0), torch.tensor([[1.0, 0.5, 0.0]]))
    torch.testing.assert_close(importance_weights(pi, mu, clip=2.5), torch.tensor([[2.5, 0.5, 0.0]]))


def g_of_the_thesis(r: Tensor, w: Tensor, m: int, ended: bool, v: float, gamma: float) -> float:
    """Equation 2.23 as printed, up to step m."""
    total = 0.0
    for k_prime in range(m):
        product = 1.0
        for ell in range(k_prime + 1):
            product *= float(w[ell])
        total += gamma**k_prime * product * float(r[k_prime])
    return total + (0.0 if ended else gamma**m * v)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_returns_are_those_of_the_thesis(weighted: bool, steps: int) -> None:
    g = torch.Generator().manual_seed(steps)
    r = torch.randn(steps, 40, generator=g, dtype=torch.float64)
    w = torch.rand(steps, 40, generator=g, dtype=torch.float64) * 1.5
    length = torch.randint(1, steps + 1, (40,), generator=g)
    ended = torch.rand(40, generator=g) < 0.4
    v = torch.randn(40, generator=g, dtype=torch.float64)
    got = sequence_returns(r, length, ended, v, w if weighted else None, discount=0.9)
    ones = torch.ones_like(w)
    expected = [
        g_of_the_thesis(
            r[:, b], (w if weighted else ones)[:, b], int(length[b]), bool(ended[b]), float(v[b]), 0.9
        )
        for b in range(40)
    ]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_what_follows_a_sequence_does_not_count() -> None:
    r = torch.tensor([[1.0], [torch.inf], [torch.nan]])
    w = torch.tensor([[0.5], [torch.nan], [1.0]])
    arguments = torch.tensor([1]), torch.tensor([True]), torch.tensor([torch.nan])
    torch.testing.assert_close(sequence_returns(r, *arguments, w, discount=0.9), torch.tensor([0.5]))


def test_the_target_adds_the_positive_part_of_the_last_advantage() -> None:
    g, phi = torch.tensor([1.0, 1.0]), torch.tensor([-3.0, 2.0])
    torch.testing.assert_close(cumulative_target(g, phi), torch.tensor([1.0, 3.0]))
    # (1 - w) r + g: the chosen action's own reward counts in full
    r, w = torch.tensor([10.0, 10.0]), torch.tensor([0.0, 0.25])
    torch.testing.assert_close(cumulative_target(g, phi, r, w), torch.tensor([11.0, 10.5]))


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("game", [KUHN, ALIASED_CHAIN], ids=["kuhn poker", "aliased chain"])
def test_with_tables_arm_reproduces_the_regrets_of_cfr_plus(game: Game, steps: int) -> None:
    """A+ of every observation and action in 30 iterations, times the observation's chance and opponent
    reach, by which CFR weighs regrets and a mean over visits does not."""
    for arm, (regrets, reach) in zip(
        tabular_arm(game, steps=steps, iterations=30),
        counterfactual_regrets(game, iterations=30),
        strict=True,
    ):
        for observation, advantage in arm.items():
            torch.testing.assert_close(advantage * reach[observation], regrets[observation])


def test_where_states_look_alike_the_policy_takes_the_better_action_of_both() -> None:
    """Chances 0.4 and 0.6, gains 3 and 1 for the right action, which differs, and -1 for the wrong one."""
    *_, last = tabular_arm(ALIASED_CHAIN, steps=2, iterations=10)
    assert float(regret_matching(last["start"])[0]) > 0.99


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: regret_matching(torch.tensor(1.0)), r"shaped \[..., A\]"),
        (lambda: importance_weights(torch.ones(1, 2), torch.ones(2, 1), clip=1.0), "shaped"),
        (lambda: importance_weights(torch.ones(1, 2), torch.ones(1, 2), clip=-1.0), "at least 0"),
        (lambda: importance_weights(torch.ones(1, 2), torch.ones(1, 2), clip=math.nan), "at least 0"),
        (
            lambda: sequence_returns(
                torch.ones(2, 3), torch.ones(3), torch.ones(3), torch.ones(3), discount=0.9
            ),
            "bool",
        ),
        (
            lambda: sequence_returns(
                torch.ones(2, 3), torch.ones(3), torch.ones(3) > 0, torch.ones(3), discount=1.1
            ),
            "discount",
        ),
        (lambda: cumulative_target(torch.ones(2), torch.ones(3)), "shaped"),
        (lambda: cumulative_target(torch.ones(2), torch.ones(2), None, torch.ones(2)), "need the rewards"),
    ],
)
def test_bad_input_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
