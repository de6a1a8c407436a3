"""Runs of strategies with a centre: the learners, the centre's loop, and a ledger of what was exchanged.

Everything is a function at module level, so a member can be a thread, a process or a simulated one. The last
rank keeps the centre. Learners tell it by mail that they are done; it drains, publishes its vector and ends.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laws.problems import OPTIMIZERS, Point, Problem, TrainingResult
from murmurate.fabric.interface import FabricError
from murmurate.fabric.simulated.fabric import MailFaults, SimulatedFabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.interface import Strategy

LAST = 1 << 40  # the number of the cut at the end
PATIENCE_SECONDS = 30.0


class Watched:
    """A channel that notes the mail that goes through it; of what is sent also whether it could be."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.sent: list[tuple[int, str, Tensor, float, bool]] = []
        self.received: list[tuple[int, str, Tensor, float]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._channel, name)

    def send(self, to, tag, x, note=0.0, deadline_seconds=None) -> bool:
        copy = x.detach().clone()
        sent = self._channel.send(to, tag, x, note, deadline_seconds)
        self.sent.append((to, tag, copy, note, sent))
        return sent

    def receive(self, tag):
        return self._note(tag, self._channel.receive(tag))

    def wait(self, tag, deadline_seconds):
        return self._note(tag, self._channel.wait(tag, deadline_seconds))

    def _note(self, tag, message):
        if message is not None:
            self.received.append((message.sender, tag, message.x.clone(), message.note))
        return message


def folded(found: Served, size: int) -> list[Tensor]:
    """For each learner the sum of what the centre took in from it, and did not refuse."""
    sums = [torch.zeros_like(found.params) for _ in range(size - 1)]
    answers = [[note >= 0 for to, _, _, note, _ in found.watched.sent if to == r] for r in range(size - 1)]
    for sender, _, x, note in found.watched.received:
        if note >= 0 and (not answers[sender] or answers[sender].pop(0)):
            sums[sender] += x
    return sums


@dataclass
class Served:
    """What became of the centre."""

    params: Tensor
    state: dict[str, Any]
    strategy: dict[str, Any]
    watched: Any
    cuts: dict[int, Any] = field(default_factory=dict)  # replicator.state() at each checkpoint it drained
    drained: bool = True


def is_centre(own_fabric: Any) -> bool:
    return bool(own_fabric.rank == own_fabric.size - 1)


def serve_until(
    replicator: Replicator, own_fabric: Any, cut: tuple[int, int, float] = (0, 0, 0.0)
) -> tuple[bool, dict[int, Any]]:
    """Serve until all living learners have said they are done; drain; publish the vector; end.

    ``cut``: (number, turns, deadline_seconds): after so many turns, or when learners have ended sooner,
    drain that checkpoint too.
    """
    ends = own_fabric.channel("ends", torch.zeros(1))
    left, turn, kept, (number, turns, patience) = set(range(own_fabric.size - 1)), 0, {}, cut
    while (going := bool(left & set(own_fabric.living()))) or number > 0:
        if number and (turn == turns or not going):
            if replicator.drain(number, patience):
                kept[number] = replicator.state()
            number = 0
        turn += 1
        with torch.no_grad():
            for bound in replicator.bound_replicas.values():
                bound.strategy.serve(bound.replica, bound.channel)
        while (message := ends.receive("done")) is not None:
            left.discard(message.sender)
    drained = replicator.drain(LAST, PATIENCE_SECONDS)
    replicator.publish()
    for rank in range(own_fabric.size - 1):
        ends.send(rank, "shown", torch.zeros(1))
    return drained, kept


def finish(replicator: Replicator, own_fabric: Any) -> bool:
    """A learner's end: its last pushes are out, and the centre has shown what has become of them."""
    centre, ends = own_fabric.size - 1, own_fabric.channel("ends", torch.zeros(1))
    drained = replicator.drain(LAST, PATIENCE_SECONDS)
    replicator.publish()
    ends.send(centre, "done", torch.zeros(1))
    while ends.wait("shown", 0.05) is None:
        if centre not in own_fabric.living():
            raise FabricError(f"rank {centre} died before it had shown the end")
    return drained


def solve(problem: Problem, strategy: Strategy, updates: int, own_fabric: Any) -> TrainingResult | Served:
    """``problem``'s net under ``strategy``: a learner's path, or what the centre came to."""
    replicator = Replicator(strategy, own_fabric)
    replica = replicator.replicate(
        "model", problem.net(own_fabric.rank), OPTIMIZERS[problem.optimizer], **problem.options()
    )
    bound = replicator.bound_replicas["model"]
    if is_centre(own_fabric):
        return keep(replicator, own_fabric)
    result = problem._run(replica, updates, (own_fabric.rank,))
    finish(replicator, own_fabric)
    result.strategy = bound.strategy.state()
    result.consensus = bound.strategy.consensus(replica, bound.channel)  # type: ignore[attr-defined]
    return result


def keep(replicator: Replicator, own_fabric: Any, cut: tuple[int, int, float] = (0, 0, 0.0)) -> Served:
    """The centre's whole life."""
    (bound,) = replicator.bound_replicas.values()
    bound.channel = Watched(bound.channel)
    drained, cuts = serve_until(replicator, own_fabric, cut)
    params, state = bound.replica.params.detach().clone(), bound.replica.state()
    return Served(params, state, bound.strategy.state(), bound.channel, cuts, drained)


# -- exact sums: gradients of whole numbers, rates of powers of two ------------------------------------

ETA = 0.125
START = (3.0, -2.0, 0.5)


def gradient_of(rank: int) -> Tensor:
    return torch.tensor([1.0 + rank, -2.0 * rank, 5.0], dtype=torch.float64)


def plain(parameters):
    return torch.optim.SGD(parameters, lr=ETA)


@dataclass
class Learned:
    """What became of a learner whose gradients are all the same."""

    params: Tensor
    steps: int
    exchanges: list[Any]
    strategy: dict[str, Any]
    cut: Any = None  # replicator.state() once it had drained the checkpoint, None if it missed it
    drained: bool = True


@dataclass(frozen=True)
class Exact:
    """A run whose every sum is exact, so that what is lost or counted twice shows to the bit.

    saves: at which own step each learner drains checkpoint 1 (0: never). turns: at which turn the centre
        does (-1: never).
    """

    strategy: Strategy
    steps: int = 8
    saves: tuple[int, ...] = ()
    turns: int = 0
    patience_seconds: float = PATIENCE_SECONDS
    haste_seconds: float = 1e-4
    restored: tuple[Any, ...] = ()

    def member(self, seed: int, own_fabric: Any) -> Learned | Served:
        replicator = Replicator(self.strategy, own_fabric)
        replica = replicator.replicate("x", Point(*START), plain)
        if self.restored:
            replicator.load(self.restored[own_fabric.rank])
            barrier = own_fabric.channel("barrier", torch.zeros(1))
            barrier.gather(torch.zeros(1))
            replicator.resumed()
            barrier.gather(torch.zeros(1))
        if is_centre(own_fabric):
            cut = (1 if self.saves and self.turns >= 0 else 0, self.turns, self.patience_seconds)
            return keep(replicator, own_fabric, cut)
        pace, exchanges, saved = np.random.default_rng([seed, own_fabric.rank]), [], None
        for step in range(1, self.steps + own_fabric.rank + 1):
            own_fabric.compute(pace.uniform(0, self.haste_seconds))
            exchanges.append(replica.follow(gradient_of(own_fabric.rank)))
            if (
                self.saves
                and step == self.saves[own_fabric.rank]
                and replicator.drain(1, self.patience_seconds)
            ):
                saved = replicator.state()
        drained = finish(replicator, own_fabric)
        (bound,) = replicator.bound_replicas.values()
        params = replica.params.detach().clone()
        return Learned(params, replica.clock, exchanges, bound.strategy.state(), saved, drained)

    def run(self, seed: int, learners: int, **faults: Any) -> list[Any]:
        fabric = SimulatedFabric(learners + 1, seed=seed, **faults)
        return fabric.run([functools.partial(self.member, seed)] * (learners + 1))


def troubled(seed: int, learners: int, crash: bool = False) -> dict[str, Any]:
    """Delays, and mail that is lost, doubled and overtaken and mended; perhaps the death of a learner."""
    draw = np.random.default_rng([77, seed])
    faults = MailFaults(loss=0.2, duplication=0.2, reordering=0.2, resend_seconds=1e-3)
    crashes = {int(draw.integers(learners)): int(draw.integers(12, 45))} if crash else {}
    return {"latency": (0.0, 3e-4), "mail_faults": faults, "crashes": crashes}


def check_exchanges(exchanges: list[Any], size: int) -> None:
    rounds = 0
    for exchange in exchanges:
        assert all(type(value) is int for value in exchange)
        assert 0 <= exchange.round - rounds <= 1
        assert 1 <= exchange.heard <= size
        assert exchange.staleness >= 0
        rounds = exchange.round


# -- the centre's death --------------------------------------------------------------------------------


def until_told(strategy: Strategy, own_fabric: Any) -> tuple[float, str]:
    """(virtual seconds, what the error said) of a learner that goes on until it hears of the death."""
    replicator = Replicator(strategy, own_fabric)
    replica = replicator.replicate("x", Point(*START), plain)
    if is_centre(own_fabric):
        keep(replicator, own_fabric)
        raise RuntimeError("it was to die")
    try:
        for _ in range(100_000):
            own_fabric.compute(1e-4)
            replica.follow(gradient_of(own_fabric.rank))
    except FabricError as error:
        return own_fabric._fabric.virtual_seconds, str(error)
    raise RuntimeError("it went on for ever")


def check_death_is_told(strategy: Strategy, learners: int, seeds: range) -> None:
    """Every learner gets an error that names the centre, within a fraction of its deadline."""
    for seed in seeds:
        call = int(np.random.default_rng([5, seed]).integers(14, 60))
        fabric = SimulatedFabric(
            learners + 1, seed=seed, crashes={learners: call}, latency=(0.0, 3e-4), mail_deadline_seconds=10.0
        )
        *told, dead = fabric.run([functools.partial(until_told, strategy)] * (learners + 1))
        assert isinstance(dead, BaseException)
        (died,) = (e.time_seconds for e in fabric.log if e.kind == "crash")
        for seconds, message in told:
            assert re.match(rf"rank {learners}, which kept the centre, is dead or out of reach", message)
            assert seconds - died < 0.5


# -- the theory's ball ---------------------------------------------------------------------------------

CURVATURES = torch.tensor([1.0, 0.6, 0.3], dtype=torch.float64).repeat_interleave(40)
GOAL = torch.linspace(-1.0, 1.0, len(CURVATURES), dtype=torch.float64)


@dataclass(frozen=True)
class LeastSquares:
    """f(x) = (x - goal)' H (x - goal) / 2 with noise of variance sigma^2 on each entry of its gradient."""

    strategy: Strategy
    eta: float = 0.05
    sigma: float = 1.0
    steps: int = 1000
    every: int = 5  # own updates between two looks at the own parameters

    def member(self, seed: int, own_fabric: Any) -> list[Tensor] | Served:
        replicator = Replicator(self.strategy, own_fabric)
        start = torch.zeros_like(GOAL)
        replica = replicator.replicate("x", Point(*start.tolist()), lambda p: torch.optim.SGD(p, lr=self.eta))
        if is_centre(own_fabric):
            return keep(replicator, own_fabric)
        noise = torch.Generator().manual_seed(1000 * seed + own_fabric.rank)
        looks = []
        for step in range(self.steps):
            xi = torch.randn(len(GOAL), generator=noise, dtype=torch.float64)
            replica.follow(CURVATURES * (replica.params.detach() - GOAL) + self.sigma * xi)
            if (step + 1) % self.every == 0 and step > self.steps // 3:
                looks.append(replica.params.detach() - GOAL)
        finish(replicator, own_fabric)
        return looks

    def run(self, learners: int, seed: int = 0) -> tuple[list[Tensor], Served]:
        """(one look after the other [k, N] of each learner's distance to the goal, the centre)."""
        fabric = SimulatedFabric(learners + 1, seed=seed, keep_log=False)
        *looks, centre = fabric.run([functools.partial(self.member, seed)] * (learners + 1))
        return [torch.stack(one) for one in looks], centre


def delayed_ball(pull: float, noise: float, delay: int) -> float:
    """The stationary E x^2 of x_{k+1} = x_k - pull x_{k-delay} + noise xi, from its Lyapunov equation."""
    companion = np.diag(np.ones(delay), -1)
    companion[0, 0] += 1.0
    companion[0, delay] -= pull
    return stationary([companion], [noise**2 * unit(delay + 1, 0)])


def stationary(moves: list[np.ndarray], noises: list[np.ndarray], which: int = 0) -> float:
    """E z_which^2 where each move z <- A z + (noise of covariance Q) is drawn alike: S = mean(A S A' + Q)."""
    n = len(moves[0])
    step = sum(np.kron(a, a) for a in moves) / len(moves)
    source = sum(noises) / len(noises)
    covariance = np.linalg.solve(np.eye(n * n) - step, source.flatten()).reshape(n, n)
    assert np.linalg.eigvals(step).__abs__().max() < 1
    return float(covariance[which, which])


def unit(n: int, i: int) -> np.ndarray:
    square = np.zeros((n, n))
    square[i, i] = 1.0
    return square


Ball = Callable[[float], float]  # curvature -> the stationary variance of one entry


def over_curvatures(ball: Ball) -> float:
    """The mean over all entries."""
    values, counts = np.unique(CURVATURES.numpy(), return_counts=True)
    return float(sum(c * ball(float(h)) for h, c in zip(values, counts, strict=True)) / counts.sum())
