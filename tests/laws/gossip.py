"""GALA's runs as products of matrices: the state augmented by the messages, and Proposition 1 on it.

X [n, d] are the members' vectors. The augmented state Z stacks X over every vector ever published. Each
event is linear in Z:

- an update of member i adds -alpha g to row i: alpha G(s) has that one row;
- a publication appends a copy of row i;
- an average replaces row i by the mixing matrix's row i, its weights laid on i and on the very versions
  that were peeked.

So X(k) = E Phi(k, 0) E' X(0) + sum_s E Phi(k, s) E' alpha G(s), with E the first n rows. Phi(k, s) E' is
carried along for each s as [rows, n]: the identity over zeros when s happens (messages published before
know nothing of it), and from then on mixed like Z itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from laws.problems import Point, slope
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.gala import GALA
from murmurate.topology import Topology, event_matrix, topology


class Augmented:
    """Z, and Phi(k, s) E' of every update s so far."""

    def __init__(self, starts: np.ndarray) -> None:
        self.size = len(starts)
        self.z = starts.copy()
        self.phi = np.zeros((0, self.size, self.size))  # [updates, rows, n]
        self.moved: list[float] = []  # ||alpha G(s)||_F
        self.row_of: dict[tuple[int, int], int] = {}  # (publisher, version) -> row

    def update(self, i: int, step: np.ndarray) -> None:
        self.z[i] += step
        self.moved.append(float(np.linalg.norm(step)))
        fresh = np.zeros((1, len(self.z), self.size))
        fresh[0, : self.size] = np.eye(self.size)
        self.phi = np.concatenate([self.phi, fresh])

    def publish(self, i: int, version: int) -> None:
        self.row_of[i, version] = len(self.z)
        self.z = np.concatenate([self.z, self.z[i : i + 1]])
        self.phi = np.concatenate([self.phi, self.phi[:, i : i + 1]], axis=1)

    def average(self, i: int, weights: np.ndarray, versions: dict[int, int]) -> None:
        """``weights`` [n]: row i of the mixing matrix; ``versions``: which of each peer's was peeked."""
        row = np.zeros(len(self.z))
        row[i] = weights[i]
        for j, version in versions.items():
            row[self.row_of[j, version]] = weights[j]
        assert abs(row.sum() - weights.sum()) < 1e-12  # every peer with a weight was peeked, and nobody else
        self.z[i] = row @ self.z
        self.phi[:, i] = np.einsum("r,srn->sn", row, self.phi)

    @property
    def members(self) -> np.ndarray:
        return self.z[: self.size]

    def norms(self) -> np.ndarray:
        """[updates]: ||(I - J) E Phi(k, s) E'||_2, how much of what s moved may still keep members apart."""
        tops = self.phi[:, : self.size]
        norms: np.ndarray = np.linalg.norm(tops - tops.mean(axis=1, keepdims=True), 2, axis=(1, 2))
        return norms

    def bound(self) -> float:
        """sum_s ||(I - J) E Phi(k, s) E'||_2 ||alpha G(s)||_F."""
        return float(self.norms() @ np.array(self.moved))


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


@dataclass(frozen=True)
class Gossip:
    """A GALA run on the simulated fabric whose log tells everything."""

    topology: str = "ring"
    size: int = 4
    updates: int = 10
    optimizer: Callable[[list[object]], torch.optim.Optimizer] = momentum
    staleness_bound: int = 0
    haste: float = 2e-5  # virtual seconds a gradient takes at most
    latency: float = 1e-4  # virtual seconds a message takes at most

    def member(self, seed: int, own_fabric) -> list[tuple[int, int, int]]:
        strategy = GALA(topology=self.topology, staleness_bound=self.staleness_bound)
        replica = Replicator(strategy, own_fabric).replicate(
            "x", Point(1.0, -0.5, 2.0, 0.0, 1.5), self.optimizer
        )
        update = replica.update

        def noted_update() -> None:
            before = replica.params.detach().clone()
            update()
            own_fabric.note("update", (replica.params.detach() - before).numpy())

        replica.update = noted_update
        pace = np.random.default_rng([seed, own_fabric.rank])
        own_fabric.note("start", replica.params.detach().numpy().copy())
        for step in range(self.updates):
            own_fabric.compute(pace.uniform(0, self.haste))
            exchange = replica.follow(slope(own_fabric.rank, step, replica.params.detach()))
            own_fabric.note("stepped", (exchange, replica.params.detach().numpy().copy()))
        return replica.params.detach().clone()

    def run(self, seed: int, **faults: object) -> SimulatedFabric:
        fabric = SimulatedFabric(self.size, seed=seed, latency=(0.0, self.latency), **faults)
        fabric.run([functools.partial(self.member, seed)] * self.size)
        return fabric


def replay(
    fabric: SimulatedFabric, name: str, recorded: bool = False
) -> Iterator[tuple[Augmented, int, object, dict[int, int]]]:
    """The log's events laid on the augmented state.

    An event's matrix is that of the topology or, with ``recorded`` (a death changes the graph, for each
    member when it learns of it), uniform over whom the log says was averaged.

    Yields after each update (then the exchange is None) and each whole step: (state, member, (exchange,
    its real vector) or None, what it peeked).
    """
    graph: Topology = topology(name)
    starts = {e.rank: e.detail for e in fabric.log if e.kind == "start"}
    state = Augmented(np.stack([starts[i] for i in range(fabric.size)]))
    peeked: dict[int, dict[int, int]] = {i: {} for i in range(fabric.size)}
    for event in fabric.log:
        i = event.rank
        if event.kind == "update":
            state.update(i, event.detail)
            yield state, i, None, {}
        elif event.kind == "publish":
            state.publish(i, event.version)
        elif event.kind == "peek":
            peeked[i][event.peer] = event.version
        elif event.kind == "stepped":
            exchange, _ = event.detail
            if peeked[i]:
                weights = event_matrix(graph, fabric.size, i, exchange.round - 1)[i]
                if recorded:
                    weights = np.zeros(fabric.size)
                    weights[[i, *peeked[i]]] = 1 / (1 + len(peeked[i]))
                state.average(i, weights, peeked[i])
            yield state, i, event.detail, peeked[i]
            peeked[i] = {}
