"""The optimizer's step without torch's wrapper that imports its compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from murmurate.replica.optimizer_state import _without_compiler

OPTIMIZERS = [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_its_steps_and_hooks_are_torchs(kind: Any) -> None:
    found = []
    for own in (False, True):
        x = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 7))
        optimizer, seen = kind([x], lr=0.1), list[str]()
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
        step = _without_compiler(type(optimizer).step) if own else type(optimizer).step
        assert (step is not type(optimizer).step) == own, (
            "torch wraps it in another way: it imports the compiler"
        )
        for _ in range(3):
            x.grad = torch.sin(3 * x.detach())
            step(optimizer)
        assert seen == ["before", "after"] * 3
        assert torch.is_grad_enabled()
        found.append(x.detach())
    assert torch.equal(*found)
