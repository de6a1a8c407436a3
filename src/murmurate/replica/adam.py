"""Adam of one vector, for little more than its arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


class Adam(torch.optim.Adam):
    """torch's own with ``fused=True``, state and results included (Kingma and Ba 2015, Algorithm 1).

    A replica has one vector, and a step of it is one call of torch's kernel. torch takes it in lists, grouped
    by device, within a profiler's range and two hints for its compiler: 0.25 ms on a CPU in the midst of
    training, where the step of a small image net itself takes 0.35. Whatever is not plain (hooks, several
    groups, other options) it does as it always has.
    """

    def __init__(self, parameters: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(parameters, lr=lr, fused=True, **options)

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        parameters = group["params"]
        if closure is not None or len(self.param_groups) > 1 or len(parameters) != 1 or self._watched(group):
            return self._all_of_it(closure)
        (x,) = parameters
        memory = self.state[x]
        if not memory or x.grad is None:  # the first step makes the memory
            return self._all_of_it(closure)
        with torch.no_grad():
            memory["step"].add_(1)
            first, second = group["betas"]
            torch._fused_adam_(
                [x],
                [x.grad],
                [memory["exp_avg"]],
                [memory["exp_avg_sq"]],
                [],
                [memory["step"]],
                lr=group["lr"],
                beta1=first,
                beta2=second,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=group["maximize"],
            )
        return None

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it; see _all_of_it

    def _all_of_it(self, closure: Any) -> Any:
        whole = torch.optim.Adam.step
        if not getattr(whole, "hooked", False):  # torch wraps it when somebody makes one
            whole = self.profile_hook_step(whole)
        return whole(self, closure)

    def _watched(self, group: dict[str, Any]) -> bool:
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or not group["fused"]  # as a state may say that was loaded
            or getattr(self, "grad_scale", None) is not None  # torch.amp's
            or getattr(self, "found_inf", None) is not None
            or group["amsgrad"]
            or group["differentiable"]
            or group["decoupled_weight_decay"]
        )
