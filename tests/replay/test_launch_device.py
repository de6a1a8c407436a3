"""Triton launches kernels on torch's current device, which need not be that of the tensors."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from compiled import GPU, needs_triton
from murmurate.native import gpu
from murmurate.replay.sum_tree import sum_tree

# the current device is the first one
DEVICE = torch.device("cuda:1" if torch.cuda.device_count() > 1 else GPU)


def fused_step() -> None:
    from murmurate.losses._triton_q import FusedStep

    q, numbers = torch.zeros(4, 3, device=DEVICE), torch.ones(4, device=DEVICE)
    loss, error = FusedStep.apply(q, numbers.long(), numbers, numbers, numbers, q, q)
    assert (loss.item(), error.tolist()) == (0.5, [1.0] * 4)


def windows() -> None:
    from murmurate.replay._triton_frames import gather

    frames = torch.arange(6, dtype=torch.uint8, device=DEVICE).view(6, 1, 1)
    out = torch.zeros(2, 3, 1, 1, dtype=torch.uint8, device=DEVICE)
    gather(frames, torch.tensor([0, 3], device=DEVICE), out)
    assert out.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def tree() -> None:
    made = sum_tree(40, backend="triton", device=DEVICE)
    made.set(torch.tensor([3, 39]), torch.tensor([1.0, 2.0]))
    assert made.find(torch.tensor([0.5, 1.5], dtype=torch.float64)).tolist() == [3, 39]
    assert set(made.sample(20, 0.5).indices.tolist()) == {3, 39}


@needs_triton
@pytest.mark.parametrize("use", [fused_step, windows, tree])
def test_kernels_run_on_the_device_of_their_tensors(use, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, real = [], gpu.on
    monkeypatch.setattr(gpu, "on", lambda device: (entered.append(device), real(device))[1])
    use()
    assert entered
    assert {torch.empty(0, device=device).device for device in entered} == {
        torch.empty(0, device=DEVICE).device
    }


def test_the_device_is_torch_s_current_one_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(entered.append(device)))
    for name in ("cuda:1", "cpu"):
        with gpu.on(torch.device(name)):
            pass
    assert entered == [torch.device("cuda:1")]
