"""The benchmarks of spatial convolution: what they count, what they conclude, and that a table goes on."""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from murmurate.bench import _dtensor, spatial_table
from murmurate.bench._dtensor import compared
from murmurate.bench._spatial_layers import DrawnLayer, error_in_parts
from murmurate.bench._spatial_nets import UNet
from murmurate.bench._spatial_timing import Case, activation_bytes, timed
from murmurate.bench.spatial_table import TablePlan, measure, verdict
from murmurate.errors import RunFailed
from murmurate.spatial import SpatialTensor


def row(size: int = 512, parts: int = 2, speed: float = 1.9, cores: bool = True, dilation: int = 1):
    return {
        "size": size,
        "parts": parts,
        "dilation": dilation,
        "forward_speedup": speed,
        "backward_speedup": 2.0,
        "enough_cores": cores,
    }


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(), row(256)], "holds in all 2 rows"),
        ([row(), row(256, speed=1.5)], "does not hold in 1 of 2 rows .*: 256 x 256 dilation 1 on 2 parts"),
        ([row(128, speed=1.0), row(256, dilation=3), row(parts=4, cores=False)], "not tested"),
    ],
)
def test_the_verdict_is_about_sizes_of_the_claim_with_a_core_for_each_part(rows, said):
    assert re.match(said, verdict(rows))


def test_activations_are_the_kept_tensors_and_the_output():
    x, weight = torch.zeros(1, 2, 8, 8, requires_grad=True), torch.zeros(2, 2, 3, 3, requires_grad=True)

    count = activation_bytes(lambda: (x, functional.conv2d(x, weight, padding=1)), weight)

    assert count == 2 * 4 * 2 * 8 * 8


def test_a_gradient_that_is_not_a_number_is_an_error():
    def layer(x, weight):
        if isinstance(x, SpatialTensor):
            weight = weight * 1.0
            weight.register_hook(lambda gradient: gradient * math.nan)
        return functional.conv2d(x, weight, padding=1)

    image, weight = torch.ones(1, 2, 8, 8).double(), torch.ones(2, 2, 3, 3).double()
    drawn = DrawnLayer("conv2d", "", layer, image, (weight,), (2, 1))

    assert error_in_parts(drawn) == math.inf


@pytest.mark.slow
def test_a_part_needs_its_share_of_memory_and_its_halo():
    whole, parts = timed(Case(64, (2, 1), dilation=3, channels=4), rounds=1)

    halo = 4 * 3 * 64 * 4  # channels, rows, columns, bytes
    assert whole.activation_bytes == 2 * 4 * 64 * 64 * 4
    assert parts.activation_bytes == whole.activation_bytes // 2 + halo
    assert min(parts.both) > 0


@pytest.mark.slow
def test_a_part_of_a_net_keeps_less_than_the_whole():
    whole, parts = timed(Case(32, (2, 1), batch=2, net=UNet), rounds=1)

    assert 0.5 < parts.activation_bytes / whole.activation_bytes < 0.8
    assert min(parts.both) > 0


@pytest.mark.slow
def test_a_table_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    plan = TablePlan((32,), (2,), (1, 3), 1, 4, 1, str(tmp_path))
    first = measure(plan, print)
    monkeypatch.setattr(spatial_table, "timed", lambda *_: pytest.fail("measured again"))

    assert measure(plan, print)["rows"] == first["rows"]
    assert (tmp_path / "speedup.svg").stat().st_size > 1000
    with pytest.raises(pytest.fail.Exception):
        measure(dataclasses.replace(plan, sizes=(64,)), print)


@pytest.mark.slow
def test_dtensor_is_told_right_from_wrong():
    found = compared(4, print)

    assert found["ours"] == {"right": 4, "wrong output": 0}
    assert found["torch, batch sharded"]["right"] == 4
    assert sum(found["torch, image sharded"].values()) == 4


def test_a_verdict_counts_once_the_other_process_has_one(monkeypatch, tmp_path):
    monkeypatch.setattr(_dtensor._roles, "join_gloo", lambda *_: None)
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", lambda *_: None)
    monkeypatch.setattr(_dtensor, "drawn_convolution", lambda seed: seed)
    monkeypatch.setattr(_dtensor, "_verdict", lambda *_: "refused")
    finished = iter([2, 2, 1])  # processes that have a verdict: the other one dies in the last layer
    channel = SimpleNamespace(gather=lambda x: dict.fromkeys(range(next(finished)), x))

    _dtensor.work(SimpleNamespace(rank=0, channel=lambda *_: channel), str(tmp_path), range(3), False)

    assert _dtensor._written_verdicts(str(tmp_path)) == ["refused", "refused"]


def test_every_layer_has_one_verdict_where_a_process_dies_last(monkeypatch):
    def run_together(members, work, folder, seeds, along_batch):
        for _ in seeds:
            _dtensor._write_verdict(folder, "right")
        raise RunFailed("rank 1 died, after rank 0 had written all its verdicts")

    monkeypatch.setattr(_dtensor._roles, "run_together", run_together)
    logged = []

    found = _dtensor.verdicts(range(10, 13), logged.append)

    assert found == {"right": 2, "wrong output": 0, "wrong gradient": 0, "refused": 0, "crashes": 1}
    assert "layer 12 crashes" in logged[0]
