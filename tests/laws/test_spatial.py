"""Law: a layer over P parts equals the whole: output, gradients of input, weight and bias (design, 6)."""

from __future__ import annotations

import pytest

from murmurate.bench._spatial_layers import KINDS, drawn_layers


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    ("count", "seed"), [(60, 0), pytest.param(500, 1, marks=pytest.mark.slow)], ids=["60", "500"]
)
def test_drawn_layers_equal_the_whole(count, seed):
    layers = drawn_layers(count, seed)
    worst, error = max(layers, key=lambda pair: pair[1])

    assert error < 1e-10, worst.text
    # none is always refused, and so left out; losses are rare
    assert {drawn.kind for drawn, _ in layers} >= KINDS.keys() - {"loss"}
