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
        assert set(case["microseconds"]) == {"triton", "torch"}
        assert case["ratio_torch"]["repetitions"] == 2
        assert case["ratio_torch"]["median"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_refuses() -> None:
    with pytest.raises(Refusal, match="torch sees none here"):
        replay_gpu.measure(replay_gpu.QUICK, lambda line: None)
