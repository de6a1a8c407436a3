"""Peer graphs and their mixing matrices, as pure functions of (position, size, clock).

An edge from ``j`` to ``i`` means that member ``i`` averages member ``j``'s vector into its own: the in-peers
of ``i`` are the members whose vectors it averages in, and its out-peers are the members that average in its
vector. Members need not communicate to agree on the graph: each computes the same one.

Graphs of plug-ins are found too: modules of the entry-point group ``murmurate.topologies``, and imported ones
(``murmurate.plugins``).

The mixing matrices are those of GALA (Assran et al. 2019, section 2 and Algorithm 1): row-stochastic, row
``i`` uniform over ``i`` and its in-peers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from murmurate import plugins
from murmurate.errors import Refusal, did_you_mean

Matrix = NDArray[np.float64]
_TOLERANCE = 1e-9  # rounding errors that a row-stochastic matrix may have


class Topology(Protocol):
    """A directed graph over positions ``0..size-1``, which may differ at each ``clock`` (number of a step).

    Peers are ascending, distinct, and never the member itself; a single member (size 1) has none. Both
    methods raise ``ValueError`` for a size below 1, a position outside the graph, or a negative clock.
    """

    name: ClassVar[str]

    def in_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]: ...
    def out_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Ring:
    """Directed ring: receive from the position before, send to the position after (GALA, section 5)."""

    name: ClassVar[str] = "ring"

    def in_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return _shifted(position, size, clock, (-1,))

    def out_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return _shifted(position, size, clock, (1,))


@dataclass(frozen=True)
class UndirectedRing:
    """Undirected ring: exchange with both neighbours (one neighbour where there are two members)."""

    name: ClassVar[str] = "undirected-ring"

    def in_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return _shifted(position, size, clock, (-1, 1))

    def out_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return self.in_peers(position, size, clock)


@dataclass(frozen=True)
class Exponential:
    """Exponential graph: receive from the positions 1, 2, 4, ... before, which are ceil(log2(size)) peers.

    The spectral gap is 2/(1 + ceil(log2(size))) for even sizes, no less for odd ones (Ying et al. 2021,
    Proposition 1).
    """

    name: ClassVar[str] = "exponential"

    def in_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return _shifted(position, size, clock, [-hop for hop in _hops(size)])

    def out_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return _shifted(position, size, clock, _hops(size))


@dataclass(frozen=True)
class OnePeerExponential:
    """The exponential graph with one peer at each clock: 1 position before, then 2, then 4, ..., cyclically.

    Where ``size`` is a power of two, log2(size) successive steps give all members the exact average (Ying et
    al. 2021, Lemma 1; Assran et al. 2019b, stochastic gradient push).
    """

    name: ClassVar[str] = "one-peer-exponential"

    def in_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return _shifted(position, size, clock, [-hop for hop in self._hop(size, clock)])

    def out_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return _shifted(position, size, clock, self._hop(size, clock))

    @staticmethod
    def _hop(size: int, clock: int) -> tuple[int, ...]:
        hops = _hops(size)
        return (hops[clock % len(hops)],) if hops else ()


@dataclass(frozen=True)
class Complete:
    """Complete graph: after one synchronous step all members have the exact average."""

    name: ClassVar[str] = "complete"

    def in_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return _shifted(position, size, clock, range(1, size))

    def out_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return self.in_peers(position, size, clock)


@dataclass(frozen=True)
class RandomMatching:
    """A new random perfect matching at every clock; with an odd size, one member has no partner.

    It is drawn from (seed, clock, size) alone, so that all members draw the same matching.
    """

    seed: int = 0
    name: ClassVar[str] = "random-matching"

    def in_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        _validate(position, size, clock)
        order = np.random.default_rng([self.seed, clock, size]).permutation(size)
        place = int(np.flatnonzero(order == position)[0])
        partner = place ^ 1
        return (int(order[partner]),) if partner < size else ()

    def out_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return self.in_peers(position, size, clock)


@dataclass(frozen=True)
class Torus:
    """Up to four neighbours on a wrapped grid, row-major, as near to a square as ``size`` allows.

    A prime size gives the undirected ring. On a grid of two rows, the neighbour above is also the neighbour
    below, and counts once.
    """

    name: ClassVar[str] = "torus"

    @staticmethod
    def grid(size: int) -> tuple[int, int]:
        """(rows, columns), rows <= columns; (1, size) where ``size`` is prime."""
        rows = next(rows for rows in range(math.isqrt(size), 0, -1) if size % rows == 0)
        return rows, size // rows

    def in_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        _validate(position, size, clock)
        rows, columns = self.grid(size)
        row, column = divmod(position, columns)
        around = {(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)}
        peers = {(r % rows) * columns + c % columns for r, c in around}
        return tuple(sorted(peers - {position}))

    def out_peers(self, position: int, size: int, clock: int = 0) -> tuple[int, ...]:
        return self.in_peers(position, size, clock)


def topology(name: str) -> Topology:
    """The graph called ``name``, with its defaults. Raises ``Refusal`` if there is none of that name."""
    known = _by_name()
    if not isinstance(name, str):  # from Python, where a strategy's field may be anything
        raise Refusal(f"topology is {name}; it takes the name of a graph. Choose one of: {', '.join(known)}.")
    if name not in known:
        hint = did_you_mean(name, known)
        raise Refusal(f"There is no topology called '{name}'.{hint} Choose one of: {', '.join(known)}.")
    return known[name]()


def topologies() -> tuple[str, ...]:
    """The names that ``topology`` knows, ascending."""
    return tuple(_by_name())


def mixing_matrix(graph: Topology, size: int, clock: int = 0) -> Matrix:
    """P [n, n]: p_ij = 1/(1+|N_in_i|) for j = i and for each in-peer j of i, else 0 (GALA, Algorithm 1)."""
    _validate(0, size, clock)
    return np.stack([event_matrix(graph, size, i, clock)[i] for i in range(size)])


def event_matrix(graph: Topology, size: int, position: int, clock: int = 0) -> Matrix:
    """The matrix [n, n] of one asynchronous mix: the identity, except for the row of ``position``, which
    averages it with its in-peers.

    A single mix need not contract: on a ring of four, ``joint_contraction`` of it alone is 1.077.
    """
    peers = graph.in_peers(position, size, clock)
    matrix = np.eye(size)
    matrix[position, [position, *peers]] = 1.0 / (1 + len(peers))
    return matrix


def second_singular_value(matrix: Matrix) -> float:
    """sigma_2 of a row-stochastic [n, n]; 0 for n = 1. Where the matrix is doubly stochastic, one step
    multiplies differences by at most this factor. Raises ``ValueError`` for a matrix that is not
    row-stochastic."""
    values = np.linalg.svd(_checked(matrix), compute_uv=False)
    return float(values[1]) if len(values) > 1 else 0.0


def joint_contraction(matrices: Sequence[Matrix]) -> float:
    """||(I - J) P_k ... P_1||_2 for ``matrices`` P_1, ..., P_k [n, n], applied in this order; J = 11'/n.

    This is the largest factor by which applying them can change a disagreement: (I - J) P J = 0 for
    row-stochastic P, so what members agree on does not matter. Every disagreement shrinks if and only if this
    norm is below 1. Raises ``ValueError`` without matrices, or for a matrix that is not row-stochastic.
    """
    if not matrices:
        raise ValueError("The joint contraction is undefined without matrices: give at least one.")
    product = _checked(matrices[0])
    for matrix in matrices[1:]:
        product = _checked(matrix) @ product
    return float(np.linalg.norm(product - product.mean(axis=0, keepdims=True), 2))


def _hops(size: int) -> tuple[int, ...]:
    """The powers of two below ``size``."""
    return tuple(1 << k for k in range((size - 1).bit_length())) if size > 1 else ()


def _shifted(position: int, size: int, clock: int, hops: Iterable[int]) -> tuple[int, ...]:
    """The positions at ``hops`` from ``position``, cyclically, without itself."""
    _validate(position, size, clock)
    return tuple(sorted({(position + hop) % size for hop in hops} - {position}))


def _validate(position: int, size: int, clock: int) -> None:
    if size < 1:
        raise ValueError(f"A graph cannot have {size} members: the size must be at least 1.")
    if not 0 <= position < size:
        raise ValueError(f"There is no position {position} among {size} members: use 0..{size - 1}.")
    if clock < 0:
        raise ValueError(f"The clock is {clock}: it counts steps from 0 up.")


def _checked(matrix: Matrix) -> Matrix:
    """``matrix`` as float64. Raises ValueError unless it is row-stochastic."""
    p = np.asarray(matrix, dtype=np.float64)
    if p.ndim != 2 or p.shape[0] != p.shape[1] or p.shape[0] < 1:
        raise ValueError(f"A mixing matrix is square, this one is {list(p.shape)}.")
    if (p < -_TOLERANCE).any() or not np.allclose(p.sum(axis=1), 1.0, rtol=0.0, atol=_TOLERANCE):
        raise ValueError("A mixing matrix is row-stochastic: entries of at least 0, rows that sum to 1.")
    return p


def _by_name() -> dict[str, Callable[[], Topology]]:
    """The graphs of this module and of plug-ins by their ``name``, ascending. Raises Refusal where two have
    one name."""
    by_name: dict[str, Any] = {}
    for value in (*globals().values(), *_of_plugins()):
        if isinstance(value, type) and dataclasses.is_dataclass(value):
            graph: Any = value
            plugins.refuse_clash("topologies", graph.name, by_name.setdefault(graph.name, graph), graph)
    return dict(sorted(by_name.items()))


def _of_plugins() -> list[type]:
    """The classes of plug-ins that have the attributes of a ``Topology``."""
    return [
        value
        for module in plugins.modules("murmurate.topologies")
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and all(hasattr(value, attribute) for attribute in ("name", "in_peers", "out_peers"))
    ]
