"""The indicator against the recursion it sums up, known spectra, and a run where it is exact."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from a_run_folder import write_records, write_run

from murmurate.record.epsilon_ball import Ball, advance, epsilon_ball, mixing_factor
from murmurate.record.runs import open_run
from murmurate.topology import mixing_matrix, topology


@pytest.mark.parametrize("beta", [0.0, 0.3, 1 / math.sqrt(2), 0.99, 1.0])
@pytest.mark.parametrize("rounds", [1, 2, 7, 50])
def test_advance_is_the_recursion_of_proposition_1(beta: float, rounds: int) -> None:
    radius = 0.25
    for _ in range(rounds):
        radius = beta * (radius + 0.5)
    assert advance(0.25, beta, rounds, 0.5) == pytest.approx(radius, rel=1e-12)


@pytest.mark.parametrize("beta", [0.3, 0.9, 1.0])
def test_parts_of_a_round_add_up(beta: float) -> None:
    for first, second in itertools.product((0.25, 0.5, 1.75), repeat=2):
        parts = advance(advance(0.7, beta, first, 0.2), beta, second, 0.2)
        assert parts == pytest.approx(advance(0.7, beta, first + second, 0.2), rel=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16])
def test_factor_of_known_graphs(size: int) -> None:
    assert mixing_factor("ring", size) == pytest.approx(math.cos(math.pi / size), abs=1e-12)
    assert mixing_factor("complete", size) == pytest.approx(0.0, abs=1e-12)
    assert mixing_factor("ring", 1) == 0.0


def test_a_graph_that_changes_is_judged_over_a_window() -> None:
    # Each of its rounds alone leaves some difference untouched; two rounds of four members leave none.
    assert mixing_factor("one-peer-exponential", 4) == 0.0
    assert 0.0 < mixing_factor("one-peer-exponential", 5) < 1.0


def _synchronous_run(folder: Path, push: np.ndarray, rounds: int, updates_per_round: int) -> np.ndarray:
    """X <- P (X - push), equal starts, recorded after every mixing; returns ||X - mean||_F by round."""
    size = len(push)
    matrix = mixing_matrix(topology("undirected-ring"), size)
    x = np.zeros_like(push)
    records, radii = [], []
    for k in range(1, rounds + 1):
        x = matrix @ (x - push)
        away = x - x.mean(0)
        radii.append(np.linalg.norm(away))
        for i in range(size):
            records.append(
                {
                    "time_seconds": float(k),
                    "replica": i,
                    "env_steps": 80 * k * updates_per_round,
                    "updates": k * updates_per_round,
                    "rounds": k,
                    "update_norm": float(np.linalg.norm(push[i])) / updates_per_round,
                    "distance_to_mean": float(np.linalg.norm(away[i])),
                }
            )
    strategy = {"name": "gala", "topology": "undirected-ring"}
    write_records(folder, records, replicas=size, strategy=strategy)
    return np.array(radii)


def test_a_replica_that_is_back_with_a_lower_count_has_not_learned_all_of_it_again(tmp_path: Path) -> None:
    def largest(folder: Path, behind: int) -> float:
        records = [
            {
                "time_seconds": float(k),
                "replica": i,
                "env_steps": 800 * k,
                **dict.fromkeys(("updates", "rounds"), 10 * k - behind * (i == 3 and k > 50)),
                **dict.fromkeys(("update_norm", "distance_to_mean"), 0.01),
            }
            for k in range(1, 101)
            for i in range(4)
        ]
        write_records(folder, records, replicas=4, strategy={"name": "gala", "topology": "ring"})
        found = epsilon_ball(open_run(folder))
        assert isinstance(found, Ball)
        return float(found.before.max())

    assert largest(tmp_path / "rejoined", 30) == pytest.approx(largest(tmp_path / "alive", 0), rel=0.1)


@pytest.mark.parametrize("updates_per_round", [1, 4])
def test_exact_where_the_proposition_is_tight(tmp_path: Path, updates_per_round: int) -> None:
    # Updates along the slowest direction of a symmetric matrix: nothing is lost to the inequality.
    size, rounds = 5, 200
    slowest = np.cos(2 * np.pi * np.arange(size) / size)
    direction = np.random.default_rng(0).normal(size=11)
    push = np.outer(slowest, direction) / 30
    radii = _synchronous_run(tmp_path / "run", push, rounds, updates_per_round)
    found = epsilon_ball(open_run(tmp_path / "run"))
    assert isinstance(found, Ball)
    assert found.beta == pytest.approx((1 + 2 * math.cos(2 * math.pi / size)) / 3, abs=1e-12)
    at_rounds = np.interp(np.arange(1, rounds + 1), found.time_seconds, found.after)
    np.testing.assert_allclose(at_rounds, radii, rtol=1e-9)
    at_rounds = np.interp(np.arange(1, rounds + 1), found.time_seconds, found.recorded)
    np.testing.assert_allclose(at_rounds, radii, rtol=1e-9)
    np.testing.assert_allclose(found.before - found.after, np.linalg.norm(push), rtol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_holds_for_any_updates_under_synchronous_symmetric_mixing(tmp_path: Path, seed: int) -> None:
    push = np.random.default_rng(seed).normal(size=(6, 13))
    _synchronous_run(tmp_path / "run", push, 100, 1)
    found = epsilon_ball(open_run(tmp_path / "run"))
    assert isinstance(found, Ball)
    assert (found.recorded <= found.after * (1 + 1e-9)).all()


def test_a_death_takes_the_dead_and_its_edge_of_the_graph_away(tmp_path: Path) -> None:
    write_run(tmp_path / "run", dead=2)
    found = epsilon_ball(open_run(tmp_path / "run"))
    assert isinstance(found, Ball)
    early, late = found.time_seconds < 700, found.time_seconds > 800
    # In the file every living replica is 0.05 (1 - t/2T) away, give or take 5 %.
    scale = 0.05 * (1 - 0.5 * found.time_seconds / 1500)
    np.testing.assert_allclose(found.recorded[early], 2 * scale[early], rtol=0.15)
    np.testing.assert_allclose(found.recorded[late], math.sqrt(3) * scale[late], rtol=0.15)
    # Two updates a round, of norm 0.04 (1 - 0.6 t/T): the radius a ring of 3 settles at.
    push = 2 * math.sqrt(3) * 0.04 * (1 - 0.6 * found.time_seconds[late] / 1500)
    settled = push * mixing_factor("ring", 3) / (1 - mixing_factor("ring", 3))
    np.testing.assert_allclose(found.after[late], settled, rtol=0.3)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"replicas": 1, "dead": None}, "one replica"),
        ({"strategy": {"name": "all-reduce"}}, "all-reduce has no topology"),
        ({"leave_out": frozenset({"update_norm"})}, "no update_norm"),
        ({"strategy": {"name": "gala", "topology": "heptagram"}}, "'heptagram'"),
    ],
)
def test_no_indicator_says_why(tmp_path: Path, changes: dict, why: str) -> None:
    write_run(tmp_path / "run", seconds=60, **changes)
    found = epsilon_ball(open_run(tmp_path / "run"))
    assert isinstance(found, str)
    assert why in found


def test_a_replica_that_recorded_no_distance_forbids_the_sum(tmp_path: Path) -> None:
    records = [
        {"time_seconds": t, "replica": i, "env_steps": t, "updates": t, "update_norm": 1.0}
        | ({"distance_to_mean": 1.0} if i == 0 else {})
        for t in (1.0, 2.0)
        for i in (0, 1)
    ]
    write_records(tmp_path / "run", records, replicas=2, strategy={"name": "gala", "topology": "ring"})
    found = epsilon_ball(open_run(tmp_path / "run"))
    assert isinstance(found, str)
    assert "[1]" in found
    assert "needs distance_to_mean of every replica" in found
    assert "--probe-every-updates" in found
