"""Which optimizers of a script can be wrapped."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from murmurate.errors import Refusal
from murmurate.replicator.optimizer_wrapper import MARK, copy_of


def check_can_be_wrapped(
    optimizer: torch.optim.Optimizer, module: nn.Module | None, wrapped: Collection[int]
) -> None:
    """Raise Refusal, before any change, if the optimizer cannot step a flat vector of ``module``'s
    parameters.

    wrapped: ids of the parameters that other wrapped optimizers step.
    """
    name = type(optimizer).__name__
    if not hasattr(optimizer, "param_groups"):
        raise Refusal(f"{name} is no optimizer: call wrap_optimizer(optimizer, module), in this order.")
    if not isinstance(module, nn.Module | None):
        raise Refusal(
            f"the second argument of wrap_optimizer is a {type(module).__name__}: give the module that has "
            "the parameters (for several, an nn.ModuleList of them), or leave it out."
        )
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    if not owned:
        raise Refusal(f"{name} has no parameters: give it those that it is to step, then wrap it.")
    if getattr(optimizer, MARK, False):  # a wrapped optimizer has the attributes of the plain one
        raise Refusal(
            "this optimizer is wrapped already: wrap each optimizer once, and use what that returns."
        )
    _check_parameters(name, owned, module, wrapped)
    _check_steps(name, owned, optimizer)


def _check_parameters(
    name: str, owned: Sequence[Tensor], module: nn.Module | None, wrapped: Collection[int]
) -> None:
    """Raise Refusal if the parameters ``owned`` cannot be one flat vector of ``module``. name: the
    optimizer's."""
    if any(id(p) in wrapped for p in owned):
        raise Refusal(
            f"{name} has parameters that another wrapped optimizer steps: give each parameter to one "
            "optimizer, or use parameter groups of one."
        )
    if module is not None:
        foreign = len({id(p) for p in owned} - {id(p) for p in module.parameters()})
        if foreign:
            raise Refusal(
                f"{foreign} of the {len(owned)} parameters of {name} are not parameters of the "
                f"{type(module).__name__}: wrap it with the module that has all of them (an nn.ModuleList, "
                "for example), made before the optimizer; or leave out the module."
            )
    frozen = sum(not p.requires_grad for p in owned)
    if frozen:
        raise Refusal(
            f"{frozen} parameters of {name} require no gradient: leave them out of its groups, as in "
            f"{name}([p for p in model.parameters() if p.requires_grad], ...)."
        )
    kinds = {(str(p.dtype), str(p.device)) for p in owned}
    if len(kinds) > 1:
        raise Refusal(
            f"the parameters of {name} have more than one dtype or device: {sorted(kinds)}. "
            "Make an optimizer for each, or use replicate_over_devices."
        )


def _check_steps(name: str, owned: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Raise Refusal if the optimizer has stepped, or does not step a flat vector of dense gradients."""
    states = [state for p in owned if (state := optimizer.state.get(p))]
    if any(float(state.get("step", 1)) > 0 for state in states):
        raise Refusal(f"{name} has stepped already. Wrap it first, then load its state with load_state_dict.")
    if _needs_closure(optimizer):
        raise Refusal(
            f"{name} computes the loss several times in one step, by the closure that it is given, and a "
            "step of a strategy is one gradient. Use an optimizer that steps without a closure, such as Adam."
        )
    if name == "SparseAdam":
        raise Refusal(
            "SparseAdam needs sparse gradients, and replicas exchange dense ones. Use Adam, whose step is "
            "dense, also for an embedding with sparse=True."
        )
    if name in ("Muon", "Adafactor") or _looks_at_shapes(optimizer):
        raise Refusal(
            f"{name} does not step a flat vector of gradients. Use replicate(name, module, make_optimizer, "
            "shape_aware=True) for optimizers that look at shapes, or another optimizer."
        )


def _looks_at_shapes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer that is not torch's own steps a matrix and a vector otherwise than both in one.

    Raises Refusal if no copy of it can be made.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return False
    group = next(group for group in optimizer.param_groups if group["params"])
    like, generator = group["params"][0], torch.Generator().manual_seed(0)
    values, gradients = torch.randn(2, 8, generator=generator).to(like)
    whole = [nn.Parameter(values.clone())]
    parts = [nn.Parameter(values[:6].reshape(3, 2).clone()), nn.Parameter(values[6:].clone())]
    try:
        for parameters in (whole, parts):
            copy = copy_of(optimizer, [{**group, "params": parameters}])
            for _ in range(2):
                start = 0
                for parameter in parameters:
                    stop = start + parameter.numel()
                    parameter.grad, start = gradients[start:stop].reshape(parameter.shape).clone(), stop
                copy.step()
    except Exception as error:
        raise Refusal(
            f"{type(optimizer).__name__} cannot be made again for a flat vector of its parameters: "
            f"{error!r}. Use replicate(name, module, make_optimizer), which takes a function that makes it."
        ) from error
    flat = torch.cat([parameter.detach().flatten() for parameter in parts])
    return not torch.allclose(flat, whole[0].detach(), rtol=1e-4, atol=1e-6)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
