"""The bench of replays on a GPU: its logic in Triton's interpreter, and what it says without a GPU."""

from __future__ import annotations

import pytest
import torch

from compiled import GPU, needs_triton
from murmurate.bench import replay_gpu
from murmurate.errors import Refusal


@needs_triton
def test_it_races_every_kernel_with_its_twin_and_draws_are_equal() -> None:
    plan = replay_gpu.ReplayGPUPlan(
        capacities=(50, 300), batches=(4,), rounds=2, calls=1, frames=20, draws=1000
    )
    result = replay_gpu.figures(plan, lambda line: None, torch.device(GPU))
    assert result["equal_draws"] == 1.0
    tasks = [case["label"].split()[0] for case in result["cases"]]
    assert tasks == ["sample", "update", "sample", "update", "frames", "q_step"]
    for case in result["cases"]:
        in_sums = {"sums"} if case["label"].startswith(("sample", "update")) else set()
        assert set(case["microseconds"]) == {"triton", "torch"} | in_sums
        for name in {"torch"} | in_sums:
            assert case[f"ratio_{name}"]["repetitions"] == 2
            assert case[f"ratio_{name}"]["median"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_refuses() -> None:
    with pytest.raises(Refusal, match="torch sees none here"):
        replay_gpu.measure(replay_gpu.QUICK, lambda line: None)


def test_draws_by_sums_are_as_likely_as_their_priorities() -> None:
    leaves = replay_gpu.priorities(3)
    drawn, weights = replay_gpu.sums_calls(3, 100_000, torch.device("cpu"))["sample"]()  # type: ignore[misc]
    shares = torch.bincount(drawn, minlength=3) / len(drawn)
    assert torch.allclose(shares, leaves / leaves.sum(), atol=0.01)
    assert torch.allclose(weights, (leaves[drawn] / leaves.min()) ** -0.4)
