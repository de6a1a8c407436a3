"""``auto`` is the precision in which the device multiplies matrices faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from murmurate.agents.a2c import A2C
from murmurate.agents.td3 import TD3
from murmurate.nets import precision
from murmurate.nets.precision import faster_precision, first_dtype
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import EnvSpec
from murmurate.workloads.image_classifier import ImageClassifier

CPU = torch.device("cpu")
IMAGES = EnvSpec("images", (4, 84, 84), torch.uint8, 3)
VECTORS = EnvSpec("vectors", (4,), torch.float32, 2)


@pytest.fixture(autouse=True)
def unmeasured() -> Iterator[None]:
    faster_precision.cache_clear()
    yield
    faster_precision.cache_clear()


def _measures(monkeypatch: pytest.MonkeyPatch, bfloat16: float, native: bool = True) -> None:
    seconds = {torch.float32: 1.0, torch.bfloat16: bfloat16}
    monkeypatch.setattr(precision, "native_bfloat16", lambda device: native)
    monkeypatch.setattr(precision, "_product_seconds", lambda: seconds)


@pytest.mark.parametrize(
    ("native", "seconds", "expected"),
    [(True, 0.5, "bfloat16"), (True, 1.9, "float32"), (False, 0.5, "float32")],
    ids=["faster", "native but slower", "emulated"],
)
def test_auto_is_the_faster_precision(
    monkeypatch: pytest.MonkeyPatch, native: bool, seconds: float, expected: str
) -> None:
    _measures(monkeypatch, seconds, native)
    assert A2C(precision="auto").resolved(IMAGES, CPU).precision == expected
    assert TD3(precision="auto").resolved(VECTORS, CPU).precision == expected
    assert ImageClassifier(precision="auto").resolved(IMAGES, CPU).precision == expected
    # torsos of vectors are always float32
    assert A2C(precision="auto").resolved(VECTORS, CPU).precision == "float32"


def test_a_precision_that_was_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _measures(monkeypatch, 1.9)
    assert A2C(precision="bfloat16").resolved(IMAGES, CPU).precision == "bfloat16"


def test_it_measures_once_in_one_thread_and_keeps_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def product_seconds() -> dict[torch.dtype, float]:
        seen.append(torch.get_num_threads())
        return {torch.float32: 1.0, torch.bfloat16: 0.5}

    monkeypatch.setattr(precision, "native_bfloat16", lambda device: True)
    monkeypatch.setattr(precision, "_product_seconds", product_seconds)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert {faster_precision(CPU) for _ in range(3)} == {"bfloat16"}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert seen == [1]


def test_products_are_timed_in_both_precisions() -> None:
    seconds = precision._product_seconds()
    assert seconds.keys() == {torch.float32, torch.bfloat16}
    assert all(0 < duration < float("inf") for duration in seconds.values())


def test_the_first_dtype_is_that_of_the_first_parameter() -> None:
    double = nn.Linear(2, 2).double()
    assert first_dtype(double) == torch.float64
    assert first_dtype(nn.Sequential(double, nn.Linear(2, 2))) == torch.float64
    assert first_dtype(nn.Sequential(nn.Flatten(), double)) == torch.float64


STEM = """
from torch import nn

class Stem(nn.Sequential):
    out_features = 8

    def __init__(self, spec, hidden):
        super().__init__(nn.Linear(4, 16).requires_grad_(False), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, observation):
        return super().forward(observation.to(self[0].weight.dtype))
"""


def test_a_torso_with_frozen_layers_computes_in_bfloat16(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STEM)
    nets = [
        A2C(torso=f"{tmp_path}/mine.py:Stem", precision=dtype).build(Context(VECTORS, Replica, 0)).net
        for dtype in ("float32", "bfloat16")
    ]
    exact, rounded = (net.torso(torch.ones(2, 4)) for net in nets)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.02, atol=0.02)
