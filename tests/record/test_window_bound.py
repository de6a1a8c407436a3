"""Proposition 1 from recorded windows: rows rebuild every vector, and real steps stay within the bound."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from a_run_folder import write_records

from laws.gossip import Gossip
from laws.problems import Point, slope
from murmurate.cli.main import main
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.record.gossip_window import GossipWindow, gossip_window
from murmurate.record.report import report
from murmurate.record.runs import open_run
from murmurate.record.window_bound import _CoefficientRows, window_bounds
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.gala import GALA
from murmurate.strategies.pull_gossip import PullGossip


@pytest.mark.parametrize(("topology", "size"), [("ring", 2), ("ring", 4), ("undirected-ring", 3)])
@pytest.mark.parametrize("seed", range(3))
def test_the_rows_rebuild_every_vector_of_a_run(topology: str, size: int, seed: int) -> None:
    gossip = Gossip(topology=topology, size=size, updates=12)
    steps: dict[int, list[list[Any]]] = {i: [] for i in range(size)}
    moved: dict[tuple[int, int], np.ndarray] = {}
    after: dict[tuple[int, int], np.ndarray] = {}
    starts, heard = {}, {i: {} for i in range(size)}
    for event in gossip.run(seed).log:
        i = event.rank
        if event.kind == "start":
            starts[i] = event.detail
        elif event.kind == "update":
            moved[i, len(steps[i])] = event.detail
        elif event.kind == "peek":
            heard[i][str(event.peer)] = event.version
        elif event.kind == "stepped":
            k = len(steps[i])
            version = 1 + k if not steps[i] else steps[i][0][1] + k
            steps[i].append([float(np.linalg.norm(moved[i, k])), version, heard[i]])
            after[i, k + 1], heard[i] = event.detail[1], {}
    assert len(after) == size * gossip.updates
    # from the middle on: what was published before are messages of the beginning
    rows = _CoefficientRows({i: {"steps": of} for i, of in steps.items()})
    for (i, k), vector in after.items():
        rebuilt = np.zeros_like(vector, dtype=np.float64)
        row = rows.after(i, k)
        assert sum(share for (kind, *_), share in row.items() if kind != "update") == pytest.approx(1.0)
        for (kind, member, number), share in row.items():
            rebuilt += share * (moved[member, number] if kind == "update" else starts[member])
        np.testing.assert_allclose(rebuilt, vector, rtol=1e-5, atol=1e-6)


def _windows(seed: int, size: int, topology: str, updates: int = 80) -> list[dict[str, Any]]:
    """The records of a run of GALA on the simulated fabric, whose clock is that of the fabric."""
    records: list[dict[str, Any]] = []

    def member(fabric) -> None:
        replicator = Replicator(GALA(topology=topology), fabric)
        sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.5)
        replica = replicator.replicate("x", Point(1.0, -0.5, 2.0, 0.0, 1.5), sgd)
        pace, done = np.random.default_rng([seed, fabric.rank]), 0
        window = GossipWindow(lambda: 500.0 * done, *replicator.bound_replicas.values(), updates=8)
        for done in range(updates):
            fabric.compute(pace.uniform(0, 2e-5))
            replica.follow(slope(fabric.rank, done, replica.params.detach()))
            window.end_iteration()
            line = {
                "time_seconds": float(done + 1),
                "replica": fabric.rank,
                "env_steps": done,
                "updates": done,
            }
            records.append(line | window.fields())

    SimulatedFabric(size, seed=seed, latency=(0.0, 1e-4)).run([member] * size)
    return records


@pytest.mark.parametrize(("topology", "size"), [("ring", 2), ("ring", 4), ("exponential", 5)])
@pytest.mark.parametrize("seed", range(3))
def test_compared_vectors_are_within_the_bound(tmp_path: Path, topology: str, size: int, seed: int) -> None:
    records = _windows(seed, size, topology)
    strategy = {"name": "gala", "topology": topology}
    write_records(tmp_path / "run", records, replicas=size, strategy=strategy)
    found = window_bounds(open_run(tmp_path / "run"))
    assert len(found) >= size
    for one in found:
        assert 0 < one.distance <= one.bound * (1 + 1e-6)
    assert np.median([one.rho for one in found]) < 0.9  # windows forget what was before
    # it is no empty promise: with a twentieth of the updates' lengths the same distances are outside
    shorter = copy.deepcopy(records)
    for record in shorter:
        for step in record.get("gossip_window", {}).get("steps", ()):
            step[0] /= 20
    write_records(tmp_path / "shorter", shorter, replicas=size, strategy=strategy)
    assert any(one.distance > one.updates for one in window_bounds(open_run(tmp_path / "shorter")))


def test_a_run_of_gala_records_windows_and_is_within_the_bound(tmp_path: Path) -> None:
    command = (
        "train cartpole-gala --launcher inline --replicas 2 --simulators 4 --env-steps none --updates 130"
    )
    command += " --eval-episodes 1 --record-every-seconds 0.1"
    assert main([*command.split(), "--out", str(tmp_path / "run")]) == 0
    found = window_bounds(open_run(tmp_path / "run"))
    assert found
    assert all(0 < one.distance <= one.bound * (1 + 1e-6) for one in found)  # it may be tight


def test_a_window_that_lacks_a_replica_is_left_out_and_the_page_counts(tmp_path: Path) -> None:
    records = _windows(0, 4, "ring")
    strategy = {"name": "gala", "topology": "ring"}
    write_records(tmp_path / "run", records, replicas=4, strategy=strategy)
    whole = window_bounds(open_run(tmp_path / "run"))
    page = report([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert f"{len(whole)} of {len(whole)} recorded distances are within the bound" in page
    partial = [{k: v for k, v in r.items() if r["replica"] or k != "gossip_window"} for r in records]
    write_records(tmp_path / "partial", partial, replicas=4, strategy=strategy)
    assert window_bounds(open_run(tmp_path / "partial")) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda w: w.update(steps=[]),
        lambda w: w["steps"][0].pop(),
        lambda w: w["steps"][0].__setitem__(1, 1.5),
        lambda w: w["cut"].update(versions={"x": 1}),
        lambda w: w["cut"].update(distance="far"),
        lambda w: w.update(window=0.5),
    ],
)
def test_a_damaged_window_is_not_computed_with(tmp_path: Path, damage) -> None:
    records = _windows(0, 2, "ring")
    for record in records:
        if "gossip_window" in record:
            damage(record["gossip_window"])
    write_records(tmp_path / "run", records, replicas=2, strategy={"name": "gala", "topology": "ring"})
    with pytest.warns(UserWarning, match="damaged"):
        assert window_bounds(open_run(tmp_path / "run")) == []


def test_only_what_averages_published_vectors_is_recorded() -> None:
    def of(strategy) -> list[GossipWindow | None]:
        def member(fabric):
            replicator = Replicator(strategy, fabric)
            replicator.replicate("x", Point(1.0, 0.0), functools.partial(torch.optim.SGD, lr=0.1))
            return gossip_window(lambda: 0.0, list(replicator.bound_replicas.values()))

        return SimulatedFabric(2, seed=0).run([member] * 2)

    assert all(isinstance(window, GossipWindow) for window in of(GALA()))
    assert of(PullGossip()) == [None, None]


def test_a_gap_in_the_versions_is_not_bridged(tmp_path: Path) -> None:
    records = _windows(0, 2, "ring")
    strategy = {"name": "gala", "topology": "ring"}
    write_records(tmp_path / "whole", records, replicas=2, strategy=strategy)
    whole = window_bounds(open_run(tmp_path / "whole"))
    for record in records:
        if "gossip_window" in record and record["replica"] == 0:
            del record["gossip_window"]["steps"][1]  # as if one update had not been recorded
    write_records(tmp_path / "run", records, replicas=2, strategy=strategy)
    left = window_bounds(open_run(tmp_path / "run"))
    assert whole
    # of replica 0 none, of replica 1 those that used nothing after the gap
    assert len(left) < len(whole) / 2
    assert {one.updates for one in left} <= {one.updates for one in whole}


def test_a_message_may_be_published_before_its_replica_reads_what_came_later(tmp_path: Path) -> None:
    """Replica 1 publishes its second vector, which 0 reads, then 2 reads one of 0, and then 1 one of 2."""
    steps = {
        0: [[1.0, 1, {"1": 2}], [1.0, 2, {}]],
        1: [[1.0, 1, {}], [1.0, 2, {"2": 3}]],
        2: [[1.0, 1, {}], [1.0, 2, {"0": 2}], [1.0, 3, {}]],
    }
    row = _CoefficientRows({i: {"steps": of} for i, of in steps.items()}).after(0, 2)
    halves = [("start", 0, 0), ("start", 1, 0), ("update", 0, 0), ("update", 1, 0), ("update", 1, 1)]
    assert row == {**dict.fromkeys(halves, 0.5), ("update", 0, 1): 1.0}
    others = {0: {"1": 2, "2": 3}, 1: {"0": 2}, 2: {"0": 2}}
    records = [
        {
            "time_seconds": 1.0,
            "replica": i,
            "gossip_window": {
                "window": 2000,
                "steps": steps[i],
                "cut": {"steps": len(steps[i]), "versions": others[i], "distance": 1.0},
            },
        }
        for i in steps
    ]
    write_records(tmp_path / "run", records, replicas=3, strategy={"name": "gala", "topology": "ring"})
    assert len(window_bounds(open_run(tmp_path / "run"))) == 3
