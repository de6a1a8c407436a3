"""The examples: what replicating them adds, and that they learn as without it."""

from __future__ import annotations

import difflib
import importlib.util

import pytest
import torch

from murmurate.strategies.gala import GALA
from replicator.example_scripts import EXAMPLES
from replicator.steps import alone, loops


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def added(name):
    before, after = (EXAMPLES / f"{name}{end}.py" for end in ("", "_replicated"))
    lines = difflib.unified_diff(
        before.read_text().splitlines(), after.read_text().splitlines(), n=0, lineterm=""
    )
    return [line for line in lines if line.startswith("+") and not line.startswith("+++")]


def test_five_lines_replicate_a_script():
    assert 1 <= len(added("resnet")) <= 5
    assert 1 <= len(added("loader")) <= 5
    assert len(added("gan")) == 6  # a second optimizer to wrap


def test_the_documentation_shows_the_lines_of_the_examples():
    shown = [
        line
        for line in (EXAMPLES.parent / "docs" / "replicator.md").read_text().splitlines()
        if line.startswith("+")
    ]
    assert [line for line in shown if line in added("resnet")] == added("resnet")
    assert len(shown) == 7
    assert set(shown) <= {*added("resnet"), *added("gan")}


def shortened(name):
    return {"epochs": 1} if name == "loader" else {"steps": 3}


@pytest.mark.parametrize("name", ["resnet", "gan", "loader"])
def test_the_replicated_example_alone_is_the_plain_one_to_the_bit(name):
    expected = example(name).main(**shortened(name))
    result = alone(lambda loop: example(f"{name}_replicated").main(loop, **shortened(name)))
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_the_replicated_gan_is_the_plain_one_on_the_joined_batch():
    """Its batches are of a size that divides, its losses are means, and it has no batch statistics."""
    expected = example("gan").main(steps=3)
    for result in loops(3, lambda loop: example("gan_replicated").main(loop, steps=3)):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)


def test_the_replicated_resnets_agree_whatever_the_strategy():
    one, two = loops(2, lambda loop: example("resnet_replicated").main(loop, steps=2))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    for result in loops(2, lambda loop: example("resnet_replicated").main(loop, steps=2), strategy=GALA()):
        assert all(bool(p.isfinite().all()) for p in result)
