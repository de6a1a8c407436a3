"""One-player views of small games as trees; CFR+ and ARM on them with exact tables.

The opponent's strategy is fixed, so its moves are chance. ARM's tables are the least-squares solutions of eq.
2.15 and 2.16 over all sequences, each with its probability.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from murmurate.losses.regret import cumulative_target, regret_matching, sequence_returns


@dataclass(frozen=True)
class Leaf:
    payoff: float


@dataclass(frozen=True)
class Chance:
    moves: tuple[tuple[float, Game], ...]


@dataclass(frozen=True)
class Decision:
    observation: str
    moves: tuple[Game, ...]


Game = Leaf | Chance | Decision
Tables = dict[str, Tensor]


def _kuhn() -> Game:
    """Kuhn poker for the first player. The opponent bets after a check, and calls a bet, with these
    probabilities by card."""
    bets, calls = {"J": 1 / 3, "Q": 0.0, "K": 1.0}, {"J": 0.0, "Q": 1 / 3, "K": 1.0}
    deals: list[tuple[float, Game]] = []
    for mine in "JQK":
        for theirs in "JQK":
            if mine == theirs:
                continue
            sign = 1.0 if "JQK".index(mine) > "JQK".index(theirs) else -1.0
            answer = Decision(mine + " check, bet", (Leaf(-1.0), Leaf(2 * sign)))
            check = Chance(((1 - bets[theirs], Leaf(sign)), (bets[theirs], answer)))
            bet = Chance(((1 - calls[theirs], Leaf(1.0)), (calls[theirs], Leaf(2 * sign))))
            deals.append((1 / 6, Decision(mine, (check, bet))))
    return Chance(tuple(deals))


def _aliased_chain() -> Game:
    """Two states that look alike; then a second choice, of which the first action is remembered."""

    def state(good: int, gain: float) -> Game:
        moves = []
        for action in range(2):
            value = gain if action == good else -1.0
            second = Decision(f"after {action}", (Leaf(value), Leaf(value - 0.5 * action)))
            moves.append(second)
        return Decision("start", tuple(moves))

    return Chance(((0.4, state(0, 3.0)), (0.6, state(1, 1.0))))


KUHN, ALIASED_CHAIN = _kuhn(), _aliased_chain()


def decisions(game: Game, reach: float = 1.0) -> Iterator[tuple[float, Decision]]:
    """Every decision node, with the probability of chance's and the opponent's moves on the way."""
    if isinstance(game, Chance):
        for probability, child in game.moves:
            yield from decisions(child, reach * probability)
    elif isinstance(game, Decision):
        yield reach, game
        for child in game.moves:
            yield from decisions(child, reach)


def counterfactual_regrets(game: Game, iterations: int) -> Iterator[tuple[Tables, dict[str, float]]]:
    """R^(CF+) of every iteration (eq. 2.8), and each observation's counterfactual reach."""
    regrets: Tables = {}
    reach: dict[str, float] = defaultdict(float)
    for probability, node in decisions(game):
        regrets[node.observation] = torch.zeros(len(node.moves), dtype=torch.float64)
        reach[node.observation] += probability
    for _ in range(iterations):
        policy = {o: regret_matching(r) for o, r in regrets.items()}

        def value(node: Game, policy: Tables = policy) -> float:
            if isinstance(node, Leaf):
                return node.payoff
            if isinstance(node, Chance):
                return sum(p * value(child) for p, child in node.moves)
            chances = policy[node.observation].tolist()
            return sum(p * value(child) for p, child in zip(chances, node.moves, strict=True))

        advantage = {o: torch.zeros_like(r) for o, r in regrets.items()}
        for probability, node in decisions(game):
            q = torch.tensor([value(child) for child in node.moves], dtype=torch.float64)
            advantage[node.observation] += probability * (q - (policy[node.observation] * q).sum())
        regrets = {o: r.clamp(min=0) + advantage[o] for o, r in regrets.items()}
        yield regrets, reach


def tabular_arm(game: Game, steps: int, iterations: int) -> Iterator[Tables]:
    """A+ of every iteration of Algorithm 1, with n-step returns and no discount."""
    nodes = list(decisions(game))
    advantage: Tables = {d.observation: torch.zeros(len(d.moves), dtype=torch.float64) for _, d in nodes}
    for _ in range(iterations):
        policy = {o: regret_matching(a) for o, a in advantage.items()}
        value = {o: torch.zeros((), dtype=torch.float64) for o in advantage}
        for _ in range(4):  # V' reaches V: no path has more decisions
            q_plus, value = _fit(nodes, policy, advantage, value, steps)
        advantage = {o: q_plus[o] - value[o] for o in advantage}
        yield advantage


def _fit(
    nodes: list[tuple[float, Decision]], policy: Tables, before: Tables, target: Tables, steps: int
) -> tuple[Tables, Tables]:
    """Q+ and V: weighted means of their targets."""
    q_plus = {o: torch.zeros_like(p) for o, p in policy.items()}
    value = {o: torch.zeros((), dtype=torch.float64) for o in policy}
    mass = dict.fromkeys(policy, 0.0)
    for reach, node in nodes:
        o = node.observation
        mass[o] += reach
        for action, child in enumerate(node.moves):
            for probability, rewards, end in _continued(child, policy, steps - 1):
                padded = torch.tensor(rewards + [0.0] * (steps - len(rewards)), dtype=torch.float64)
                g = sequence_returns(
                    padded[:, None],
                    torch.tensor([len(rewards)]),
                    torch.tensor([end is None]),
                    torch.zeros(1, dtype=torch.float64) if end is None else target[end][None],
                    discount=1.0,
                )
                weight = reach * probability
                q_plus[o][action] += weight * cumulative_target(g, before[o][action, None])[0]
                value[o] += weight * policy[o][action] * g[0]
    return {o: q / mass[o] for o, q in q_plus.items()}, {o: v / mass[o] for o, v in value.items()}


def _continued(node: Game, policy: Tables, left: int) -> Iterator[tuple[float, list[float], str | None]]:
    """All ways to go on for ``left`` more decisions: probability, rewards from the last decision on, and
    the observation that follows (None at the end)."""
    if isinstance(node, Leaf):
        yield 1.0, [node.payoff], None
    elif isinstance(node, Chance):
        for probability, child in node.moves:
            for p, rewards, end in _continued(child, policy, left):
                yield probability * p, rewards, end
    elif left == 0:
        yield 1.0, [0.0], node.observation
    else:
        for p, child in zip(policy[node.observation].tolist(), node.moves, strict=True):
            for q, rewards, end in _continued(child, policy, left - 1):
                yield p * q, [0.0, *rewards], end
