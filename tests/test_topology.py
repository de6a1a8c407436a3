"""Tables, closed forms and properties of peer graphs and mixing matrices."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from murmurate import topology as graphs
from murmurate.errors import Refusal

SYMMETRIC = {"undirected-ring", "complete", "random-matching", "torus"}

names = st.sampled_from(graphs.topologies())
sizes = st.integers(1, 24)
clocks = st.integers(0, 40)


def heard(name: str, size: int, clock: int = 0) -> list[tuple[int, ...]]:
    graph = graphs.topology(name)
    return [graph.in_peers(i, size, clock) for i in range(size)]


def spectral_gap(matrix: np.ndarray) -> float:
    """1 - |lambda_2|, where lambda_2 is the eigenvalue of second largest modulus."""
    return 1.0 - float(np.sort(np.abs(np.linalg.eigvals(matrix)))[-2])


def strongly_connected(edges: np.ndarray) -> bool:
    """Whether a path leads from each member to each other one. ``edges`` [n, n] is true at (i, j) if j is an
    in-peer of i."""
    reach = edges | np.eye(len(edges), dtype=np.bool_)
    for _ in range(max(1, (len(edges) - 1).bit_length())):
        reach = (reach.astype(np.float32) @ reach.astype(np.float32)) > 0
    return bool(reach.all())


def b_strongly_connected(graph: graphs.Topology, size: int, window: int, clocks: int) -> bool:
    """Whether any ``window`` = B successive graphs at clocks 0..clocks-1 are jointly strongly connected, the
    condition of GALA's Proposition 2."""
    edges = [graphs.mixing_matrix(graph, size, clock) > 0 for clock in range(clocks)]
    windows = (edges[start : start + window] for start in range(clocks - window + 1))
    return all(strongly_connected(np.logical_or.reduce(window)) for window in windows)


@pytest.mark.parametrize(
    ("name", "size", "clock", "expected"),
    [
        ("ring", 4, 0, [(3,), (0,), (1,), (2,)]),
        ("ring", 4, 7, [(3,), (0,), (1,), (2,)]),
        ("ring", 2, 0, [(1,), (0,)]),
        ("undirected-ring", 4, 0, [(1, 3), (0, 2), (1, 3), (0, 2)]),
        ("undirected-ring", 2, 0, [(1,), (0,)]),
        ("exponential", 5, 0, [(1, 3, 4), (0, 2, 4), (0, 1, 3), (1, 2, 4), (0, 2, 3)]),
        ("exponential", 8, 3, [tuple(sorted(((i - 1) % 8, (i - 2) % 8, (i - 4) % 8))) for i in range(8)]),
        ("one-peer-exponential", 4, 0, [(3,), (0,), (1,), (2,)]),
        ("one-peer-exponential", 4, 1, [(2,), (3,), (0,), (1,)]),
        ("one-peer-exponential", 4, 2, [(3,), (0,), (1,), (2,)]),
        ("one-peer-exponential", 5, 2, [(1,), (2,), (3,), (4,), (0,)]),
        ("complete", 3, 0, [(1, 2), (0, 2), (0, 1)]),
        ("torus", 4, 0, [(1, 2), (0, 3), (0, 3), (1, 2)]),
        ("torus", 6, 0, [(1, 2, 3), (0, 2, 4), (0, 1, 5), (0, 4, 5), (1, 3, 5), (2, 3, 4)]),
        ("torus", 5, 0, [(1, 4), (0, 2), (1, 3), (2, 4), (0, 3)]),
    ],
)
def test_who_hears_whom(name, size, clock, expected):
    assert heard(name, size, clock) == expected


def test_torus_of_twelve_is_three_by_four():
    assert graphs.Torus.grid(12) == (3, 4)
    assert graphs.Torus().in_peers(5, 12) == (1, 4, 6, 9)
    assert graphs.Torus().in_peers(0, 12) == (1, 3, 4, 8)


@pytest.mark.parametrize("name", graphs.topologies())
def test_alone_nobody_has_peers(name):
    graph = graphs.topology(name)
    assert graph.in_peers(0, 1) == graph.out_peers(0, 1) == ()
    assert graphs.mixing_matrix(graph, 1).tolist() == [[1.0]]


@settings(max_examples=150)
@given(names, sizes, clocks)
def test_in_and_out_are_duals_and_nobody_is_its_own_peer(name, size, clock):
    graph = graphs.topology(name)
    hears = {(i, j) for i in range(size) for j in graph.in_peers(i, size, clock)}
    speaks = {(i, j) for j in range(size) for i in graph.out_peers(j, size, clock)}
    assert hears == speaks
    assert all(i != j for i, j in hears)
    if name in SYMMETRIC:
        assert hears == {(j, i) for i, j in hears}


@settings(max_examples=150)
@given(names, sizes, clocks)
def test_mixing_matrices_are_uniform_and_doubly_stochastic(name, size, clock):
    graph = graphs.topology(name)
    p = graphs.mixing_matrix(graph, size, clock)
    np.testing.assert_allclose(p.sum(axis=1), 1.0, atol=1e-12)
    np.testing.assert_allclose(p.sum(axis=0), 1.0, atol=1e-12)  # all of ours are regular or matchings
    for i in range(size):
        peers = graph.in_peers(i, size, clock)
        for j in range(size):
            expected = 1 / (1 + len(peers)) if j == i or j in peers else 0.0
            assert p[i, j] == pytest.approx(expected, abs=1e-15)


@given(st.integers(2, 30), clocks, st.integers(0, 5))
def test_a_matching_pairs_all_but_the_odd_one(size, clock, seed):
    graph = graphs.RandomMatching(seed)
    partners = [graph.in_peers(i, size, clock) for i in range(size)]
    assert sum(len(p) for p in partners) == size - size % 2
    assert all(partners[p[0]] == (i,) for i, p in enumerate(partners) if p)


def test_matchings_change_with_clock_and_seed():
    def one(seed, clock):
        return tuple(graphs.RandomMatching(seed).in_peers(i, 10, clock) for i in range(10))

    assert len({one(0, clock) for clock in range(30)}) > 20
    assert len({one(seed, 0) for seed in range(30)}) > 20


def test_every_pair_meets_equally_often_in_matchings():
    size, rounds = 6, 3000
    met = np.zeros((size, size))
    for clock in range(rounds):
        for i in range(size):
            met[i, graphs.RandomMatching(1).in_peers(i, size, clock)] += 1
    off = met[~np.eye(size, dtype=bool)] / rounds
    # Each of the 5 partners has probability 1/5; five standard deviations of a binomial.
    assert np.abs(off - 0.2).max() < 5 * math.sqrt(0.2 * 0.8 / rounds)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13])
def test_ring_has_the_circulant_spectrum(n):
    # P = (I + shift)/2, so lambda_k = (1 + e^{2 pi i k/n})/2 and |lambda_1| = cos(pi/n); P is normal.
    p = graphs.mixing_matrix(graphs.Ring(), n)
    expected = (1 + np.exp(2j * np.pi * np.arange(n) / n)) / 2
    found = np.linalg.eigvals(p)
    assert all(np.abs(found - value).min() < 1e-12 for value in expected)
    assert spectral_gap(p) == pytest.approx(1 - math.cos(math.pi / n), abs=1e-12)
    assert graphs.second_singular_value(p) == pytest.approx(math.cos(math.pi / n), abs=1e-12)
    assert graphs.joint_contraction([p] * 3) == pytest.approx(math.cos(math.pi / n) ** 3, abs=1e-12)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 13])
def test_undirected_ring_has_the_cosine_spectrum(n):
    p = graphs.mixing_matrix(graphs.UndirectedRing(), n)
    moduli = np.sort(np.abs((1 + 2 * np.cos(2 * np.pi * np.arange(n) / n)) / 3))
    assert spectral_gap(p) == pytest.approx(1 - moduli[-2], abs=1e-12)


@pytest.mark.parametrize("n", [2, 4, 6, 8, 10, 16, 24])
def test_exponential_gap_of_even_sizes(n):
    gap = spectral_gap(graphs.mixing_matrix(graphs.Exponential(), n))
    assert gap == pytest.approx(2 / (1 + math.ceil(math.log2(n))), abs=1e-12)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_complete_agrees_in_one_step(n):
    p = graphs.mixing_matrix(graphs.Complete(), n)
    assert graphs.joint_contraction([p]) < 1e-15
    assert spectral_gap(p) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_one_peer_exponential_averages_exactly_in_log2_steps(n):
    graph, rounds = graphs.OnePeerExponential(), n.bit_length() - 1
    steps = [graphs.mixing_matrix(graph, n, clock) for clock in range(rounds)]
    assert graphs.joint_contraction(steps) < 1e-12
    if rounds > 1:  # the slowest mode shrinks by cos(2^k pi/n) at the k-th hop
        left = math.prod(math.cos(2**k * math.pi / n) for k in range(rounds - 1))
        assert graphs.joint_contraction(steps[:-1]) == pytest.approx(left, abs=1e-12)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 40])
def test_a_single_asynchronous_event_is_no_contraction(n):
    event = graphs.event_matrix(graphs.Ring(), n, 0)
    expected = np.eye(n)
    expected[0, 0] = expected[0, n - 1] = 0.5
    np.testing.assert_array_equal(event, expected)
    # (I-J)E = (I-J) + u v'/2 with u = e_0 - 1/n and v = e_{n-1} - e_0 has singular values 1 but for two,
    # of product 1 + u'v/2 = 1/2 and sum of squares 2 + u'v + |u|^2 |v|^2 / 4.
    squares = 1.5 - 0.5 / n
    norm = math.sqrt((squares + math.sqrt(squares**2 - 1)) / 2)
    assert graphs.joint_contraction([event]) == pytest.approx(norm, abs=1e-12)
    assert norm > 1
    if n == 4:
        assert norm == pytest.approx(1.077, abs=5e-4)


def test_a_round_of_events_contracts_though_none_of_them_does():
    events = [graphs.event_matrix(graphs.Ring(), 4, i) for i in range(4)]
    assert all(graphs.joint_contraction([event]) > 1 for event in events)
    assert graphs.joint_contraction(events) < 1


def test_joint_contraction_bounds_and_attains_the_disagreement_it_names():
    rng = np.random.default_rng(3)
    window = []
    for _ in range(5):
        p = rng.random((6, 6))
        window.append(p / p.sum(axis=1, keepdims=True))
    bound = graphs.joint_contraction(window)

    def disagreement(x):
        return np.linalg.norm(x - x.mean(axis=0))

    def ratio(x):
        start = disagreement(x)
        for p in window:  # in the order they act
            x = p @ x
        return disagreement(x) / start

    ratios = [ratio(rng.standard_normal(6)) for _ in range(300)]
    assert max(ratios) <= bound * (1 + 1e-9)
    product = np.linalg.multi_dot(window[::-1])
    worst = np.linalg.svd(product - product.mean(axis=0))[2][0]
    assert ratio(worst) == pytest.approx(bound, rel=1e-9)
    assert graphs.joint_contraction(window[::-1]) != pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "size", "window", "expected"),
    [
        ("ring", 6, 1, True),
        ("one-peer-exponential", 8, 1, False),  # hops of 2 or 4 alone never reach odd places
        ("one-peer-exponential", 8, 2, False),
        ("one-peer-exponential", 8, 3, True),
        ("random-matching", 6, 1, False),
        ("random-matching", 6, 12, True),
        ("complete", 5, 1, True),
    ],
)
def test_b_strong_connectivity(name, size, window, expected):
    assert b_strongly_connected(graphs.topology(name), size, window, clocks=24) is expected


def given_graph(in_peer_lists: list[tuple[int, ...]]) -> Any:
    return SimpleNamespace(in_peers=lambda position, size, clock: in_peer_lists[position])


def test_a_path_and_two_islands_are_not_strongly_connected():
    path = given_graph([(), (0,), (1,)])  # 0 -> 1 -> 2, and nothing comes back
    islands = given_graph([(1,), (0,), (3,), (2,)])
    long_ring = graphs.Ring()
    assert not b_strongly_connected(path, 3, 1, 1)
    assert not b_strongly_connected(islands, 4, 1, 1)
    assert b_strongly_connected(long_ring, 17, 1, 1)


@pytest.mark.parametrize("name", graphs.topologies())
def test_what_is_outside_the_graph_is_refused(name):
    graph = graphs.topology(name)
    for ask in (graph.in_peers, graph.out_peers):
        with pytest.raises(ValueError, match="at least 1"):
            ask(0, 0)
        with pytest.raises(ValueError, match="no position 3"):
            ask(3, 3)
        with pytest.raises(ValueError, match="clock is -1"):
            ask(0, 3, -1)
    with pytest.raises(ValueError, match="at least 1"):
        graphs.mixing_matrix(graph, 0)


def test_names_are_looked_up_and_a_slip_is_met_with_the_nearest():
    assert {name: graphs.topology(name).name for name in graphs.topologies()} == {
        name: name for name in graphs.topologies()
    }
    assert graphs.topologies() == (
        "complete",
        "exponential",
        "one-peer-exponential",
        "random-matching",
        "ring",
        "torus",
        "undirected-ring",
    )
    with pytest.raises(Refusal, match="Did you mean 'torus'"):
        graphs.topology("tours")
    with pytest.raises(Refusal, match="no topology called 'given'"):
        graphs.topology("given")


@pytest.mark.parametrize("matrix", [np.ones((2, 2)), np.eye(3)[:2], np.array([[2.0, -1.0], [0.0, 1.0]])])
def test_only_row_stochastic_matrices_are_measured(matrix):
    for measure in (
        graphs.second_singular_value,
        lambda m: graphs.joint_contraction([m]),
    ):
        with pytest.raises(ValueError, match="mixing matrix"):
            measure(matrix)
    with pytest.raises(ValueError, match="at least one"):
        graphs.joint_contraction([])
