"""What V-trace converges to: the values of the policy between the actor's and the learner's that rho_bar
chooses, whatever the trace (Espeholt et al. 2018, Theorem 1 and eq. 3)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from murmurate.losses.vtrace import vtrace

STATES, ACTIONS, STEPS, DISCOUNT = 3, 2, 3, 0.8


class Game:
    """A small game with all trajectories of three steps that the actor's policy mu can make in it."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.following = torch.randint(STATES, (STATES, ACTIONS), generator=g)
        self.reward = torch.randn(STATES, ACTIONS, generator=g, dtype=torch.float64)
        self.mu, self.pi = torch.randn(2, STATES, ACTIONS, generator=g, dtype=torch.float64).softmax(-1)
        cases = list(itertools.product(range(STATES), *[range(ACTIONS)] * STEPS))
        self.start = torch.tensor([case[0] for case in cases])
        self.action = torch.tensor([case[1:] for case in cases]).T
        states = [self.start]
        for action in self.action:
            states.append(self.following[states[-1], action])
        self.state, self.last = torch.stack(states[:-1]), states[-1]
        self.probability = self.mu[self.state, self.action].prod(0)  # given the start

    def values(self, policy: Tensor) -> Tensor:
        """[S]: the solution of Bellman's equations."""
        transition = torch.zeros(STATES, STATES, dtype=torch.float64)
        for s, a in itertools.product(range(STATES), range(ACTIONS)):
            transition[s, self.following[s, a]] += policy[s, a]
        reward = (policy * self.reward).sum(-1)
        return torch.linalg.solve(torch.eye(STATES, dtype=torch.float64) - DISCOUNT * transition, reward)

    def expected_targets(self, v: Tensor, **bars: float) -> Tensor:
        """[S]: V-trace's targets of each first state, weighted by the probabilities under mu."""
        never = torch.zeros(self.state.shape, dtype=torch.bool)
        rho = (self.pi / self.mu)[self.state, self.action]
        reward = self.reward[self.state, self.action]
        result = vtrace(rho, reward, v[self.state], never, never, v[self.last], discount=DISCOUNT, **bars)
        return torch.zeros_like(v).index_add(0, self.start, self.probability * result.target_t[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rho_bar", [0.5, 1.0, math.inf])
@pytest.mark.parametrize("trace", [{"c_bar": 0.0}, {"c_bar": 1.0}, {"c_bar": 1.0, "lambda_": 0.5}])
def test_it_converges_to_the_policy_that_rho_bar_chooses(
    seed: int, rho_bar: float, trace: dict[str, float]
) -> None:
    game = Game(seed)
    between = torch.minimum(rho_bar * game.mu, game.pi)  # eq. 3, normalised in the next line
    expected = game.values(between / between.sum(-1, keepdim=True))
    stay = game.expected_targets(expected, rho_bar=rho_bar, **trace)
    torch.testing.assert_close(stay, expected, rtol=1e-9, atol=1e-9)
    # targets are affine in v, so from any v they come to where they stay if no eigenvalue reaches 1
    moved = [expected + unit for unit in torch.eye(STATES, dtype=torch.float64)]
    slopes = torch.stack([game.expected_targets(v, rho_bar=rho_bar, **trace) - stay for v in moved], 1)
    assert torch.linalg.eigvals(slopes).abs().max() < 1
    if rho_bar < math.inf:
        assert (expected - game.values(game.pi)).abs().max() > 1e-3, "it is another policy"


@pytest.mark.parametrize("seed", range(3))
def test_with_rho_bar_of_nothing_it_stays_near_the_actors_policy(seed: int) -> None:
    """As rho_bar falls to 0, the policy of eq. 3 becomes mu."""
    game = Game(seed)
    v = game.values(game.mu)
    smallest = float((game.pi / game.mu).min())
    moved = game.expected_targets(v, rho_bar=0.9 * smallest, c_bar=0.9 * smallest)
    torch.testing.assert_close(moved, v, rtol=1e-9, atol=1e-9)
