"""The state of a ``torch.optim`` optimizer: in a fixed order, and with its values before the first step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]

# settings that choose an implementation, and may depend on the device
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
# initial values that are neither zero nor set by the optimizer's constructor (NAdam)
_INITIAL = {"mu_product": 1.0}


def entries(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Each parameter with its state (not a copy), group after group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, optimizer.state[parameter]


def construct(make_optimizer: MakeOptimizer, parameters: list[Any]) -> torch.optim.Optimizer:
    """``make_optimizer(parameters)``, without the import of torch's compiler.

    The import takes two seconds, also in a launcher, which never steps an optimizer. torch imports the
    compiler in a constructor only to keep the constructor out of compiled code.

    Raises TypeError for an optimizer in place of a function.
    """
    if isinstance(make_optimizer, torch.optim.Optimizer):
        made = type(make_optimizer).__name__
        raise TypeError(
            f"make_optimizer is an object of {made}, and the vector to be stepped is made later: give a "
            f"function, such as lambda parameters: torch.optim.{made}(parameters, lr=...)"
        )
    function = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is None or "torch._dynamo" in sys.modules or hasattr(function, "__dynamo_disable"):
        return make_optimizer(parameters)
    function.__dynamo_disable = function
    try:
        return make_optimizer(parameters)
    finally:
        del function.__dynamo_disable


def make_step(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, without the import of torch's compiler."""
    step_of(type(optimizer).step)(optimizer)


def step_of(step: Callable[..., Any]) -> Callable[..., Any]:
    """A class's ``step``, with its hooks, and without the import of torch's compiler.

    torch imports it at the first step, only to keep steps out of compiled code. The import takes a second in
    each process, and crashes it if an environment has loaded Mesa (``worlds.modules.import_triton``).
    """
    return step if "torch._dynamo" in sys.modules else _without_compiler(step)


@functools.cache
def _without_compiler(step: Callable[..., Any]) -> Callable[..., Any]:
    inner: Any = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    if getattr(getattr(inner, "__code__", None), "co_name", "") != "_use_grad":
        return step  # without torch's wrapper that imports the compiler

    def in_grad_mode(optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return inner.__wrapped__(optimizer, *arguments)

    return torch.optim.Optimizer.profile_hook_step(in_grad_mode)


def materialise(optimizer: torch.optim.Optimizer, make_optimizer: MakeOptimizer) -> None:
    """Create the state that the optimizer would create at its first step, with its values before that step.
    Existing state does not change."""
    if all(state for _, state in entries(optimizer)):
        return
    initial_states = initial_state(optimizer, make_optimizer)
    for (_, state), initial in zip(entries(optimizer), initial_states, strict=True):
        for key, value in initial.items():
            state.setdefault(key, value)


def initial_state(optimizer: torch.optim.Optimizer, make_optimizer: MakeOptimizer) -> list[dict[str, Any]]:
    """The state of each entry before the first step.

    A copy of the optimizer, with parameters of zeros, steps once with gradients of zero, which leaves moments
    zero; then counters are reset.
    """
    copy = _copy(optimizer, make_optimizer)
    _step_with_gradient(copy, 0.0)
    states = [state for _, state in entries(copy)]
    for state in states:
        for key, value in state.items():
            if key == "step" or key in _INITIAL:
                initial = _INITIAL.get(key, 0.0)
                state[key] = (
                    torch.full_like(value, initial) if torch.is_tensor(value) else type(value)(initial)
                )
    return states


def check_start(optimizer: torch.optim.Optimizer, make_optimizer: MakeOptimizer) -> None:
    """Raise ValueError if the first step after ``materialise`` differs from the first step without it.

    Dampened momentum is such a case: its first step uses the whole gradient, later steps only a part.
    """
    lazy, materialised = _copy(optimizer, make_optimizer), _copy(optimizer, make_optimizer)
    materialise(materialised, make_optimizer)
    _step_with_gradient(lazy, 1.0)
    _step_with_gradient(materialised, 1.0)
    for (one, _), (other, _) in zip(entries(lazy), entries(materialised), strict=True):
        if not torch.equal(one, other):
            raise ValueError(
                f"the first step of {type(optimizer).__name__} with these settings differs from the others "
                "in a way that shared moments cannot reproduce. Use another optimizer, or separate moments "
                "(hogwild: shared_moments=False)."
            )


def _copy(optimizer: torch.optim.Optimizer, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
    """An optimizer with the same settings, without state, for parameters of zeros."""
    groups = [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "params": [nn.Parameter(torch.zeros_like(p)) for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return construct(make_optimizer, groups)


def _step_with_gradient(optimizer: torch.optim.Optimizer, gradient: float) -> None:
    """Make one step with all components of the gradient equal to ``gradient``."""
    for parameter, _ in entries(optimizer):
        parameter.grad = torch.full_like(parameter, gradient)
    make_step(optimizer)
