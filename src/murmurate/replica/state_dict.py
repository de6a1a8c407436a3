"""The state of a replica for checkpoints, under its module's parameter names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from murmurate.replica.layout import view
from murmurate.replica.optimizer_state import IMPLEMENTATION, entries, initial_state, materialise

if TYPE_CHECKING:
    from murmurate.replica.vector import Replica


def state_of(replica: Replica) -> dict[str, Any]:
    """Named parameter tensors in logical order, optimizer state and settings, buffers and frozen parameters,
    clock (all clones).

    params: the parameters divided by ``exp(log_scale)``, so that a resumed run continues bit for bit.
    """
    optimizer = {
        f"{index}.{key}": value.detach().clone() if torch.is_tensor(value) else value
        for index, (_, group_state) in enumerate(entries(replica.optimizer))
        for key, value in group_state.items()
    }
    if not replica.shape_aware:
        optimizer = {k: _logical(replica, k, v) for k, v in optimizer.items()}
    vector, logarithm = replica.scale.read_consistently(
        lambda _: (replica.params.detach().clone(), replica.scale.logarithm)
    )
    return {
        "params": {name: values.clone() for name, values in replica.named_views(vector)},
        "log_scale": logarithm,
        "optimizer": optimizer,
        "buffers": {name: x.detach().clone() for name, x in fixed_tensors(replica).items()},
        "learning_rates": [
            x.item() if torch.is_tensor(x := group["lr"]) else x for group in replica.optimizer.param_groups
        ],
        # schedulers change others, too: OneCycleLR the momentum, for example
        "settings": [
            {k: x for k, x in group.items() if k != "lr" and isinstance(x, bool | int | float | tuple)}
            for group in replica.optimizer.param_groups
        ],
        "clock": replica.clock,
    }


def load_into(replica: Replica, state: dict[str, Any]) -> None:
    """Restore a state that ``state_of`` returned; if its params are None, the parameters stay unchanged.

    Raises ValueError, before any change, naming a parameter or buffer that does not fit.
    """
    params, fixed = state["params"], fixed_tensors(replica)
    # older checkpoints have no frozen parameters
    fixed = {k: x for k, x in fixed.items() if k in state["buffers"] or not isinstance(x, nn.Parameter)}
    if params is not None:
        _check_shapes("parameter", replica.named_views(), params)
    _check_shapes("buffer", fixed.items(), state["buffers"])
    if state["optimizer"]:
        materialise(replica.optimizer, replica.make_optimizer)
    with torch.no_grad():
        if params is not None:
            logarithm, has_others = float(state.get("log_scale", 0.0)), replica.scale.members > 1
            # members that share a vector load it at once, and saved it with different scales: whose values
            # are the last must not depend on whose scale is. One alone goes on bit for bit.
            replica.scale.restore(0.0 if has_others else logarithm)
            for name, values in replica.named_views():
                values.copy_(params[name] * math.exp(logarithm) if has_others else params[name])
        initial = _initial_of_partial(replica, state["optimizer"])
        for index, (_, group_state) in enumerate(entries(replica.optimizer)):
            for key in list(group_state):
                if f"{index}.{key}" in state["optimizer"]:
                    if initial and torch.is_tensor(group_state[key]):
                        group_state[key].copy_(initial[index][key])
                    _restore(replica, group_state, key, state["optimizer"][f"{index}.{key}"], index)
                else:  # saved before the first step created it
                    del group_state[key]
        for name, x in fixed.items():
            x.copy_(state["buffers"][name])
    groups = replica.optimizer.param_groups
    for group, rate in zip(groups, state["learning_rates"], strict=True):
        if torch.is_tensor(group["lr"]):  # written to, as a scheduler does
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    # older checkpoints have no settings
    for group, settings in zip(groups, state.get("settings", [{}] * len(groups)), strict=True):
        # a file has lists in the place of tuples
        for key in (settings.keys() & group.keys()).difference(IMPLEMENTATION):
            group[key] = tuple(settings[key]) if isinstance(settings[key], list) else settings[key]
    replica.clock = int(state["clock"])
    replica.reload()


def _check_shapes(kind: str, own: Iterable[tuple[str, Tensor]], stored: Mapping[str, Tensor]) -> None:
    for name, values in own:
        saved = stored.get(name)
        if saved is None or saved.shape != values.shape:
            present = "nothing" if saved is None else f"shape {tuple(saved.shape)}"
            raise ValueError(
                f"the checkpoint has {present} for {kind} '{name}' of shape {tuple(values.shape)}; "
                "it belongs to another network. Resume with the network of the checkpoint."
            )


def tensors_of(replica: Replica) -> dict[str, Tensor]:
    """Views of the parameters and buffers, by name."""
    return {**dict(replica.named_views()), **fixed_tensors(replica)}


def fixed_tensors(replica: Replica) -> dict[str, Tensor]:
    """The module's frozen parameters and its buffers, by name: what no optimizer steps."""
    stepped = {part.name for part in replica.slices}
    frozen = {name: x for name, x in replica.module.named_parameters() if name not in stepped}
    return {**frozen, **dict(replica.module.named_buffers())}


@torch.no_grad()
def write_values(replica: Replica, values: Mapping[str, Tensor]) -> None:
    """Overwrite parameters and buffers by those of the same names, except for buffers that are not
    persistent: those follow from the settings, as the bounds of actions do, which may be others there.

    Raises ValueError naming one that only one side has, that has another shape, or that is not finite; then
    some may have been overwritten.
    """
    tensors, derived = tensors_of(replica), _not_persistent(replica.module)
    if differing := tensors.keys() ^ values.keys():
        name = min(differing)
        sides = "is missing there" if name in tensors else "is only there"
        raise ValueError(f"{name} of '{replica.name}' {sides}")
    for name, own in tensors.items():
        value = values[name]
        if value.shape != own.shape:
            raise ValueError(f"{name} has shape {list(value.shape)}, and in this run {list(own.shape)}")
        refuse_not_finite(value, name)
        if name not in derived:
            own.copy_(value)
    replica.reload()


def _not_persistent(module: nn.Module) -> set[str]:
    """The names of the buffers that ``module.state_dict()`` leaves out."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, owner in module.named_modules()
        for name in owner._non_persistent_buffers_set
    }


def refuse_not_finite(saved: Tensor, name: str) -> None:
    """Raise ValueError for parameters or buffers that are not finite: no checkpoint is saved with them."""
    if not torch.isfinite(saved).all():
        raise ValueError(f"{name} is not finite")


def _initial_of_partial(replica: Replica, stored: dict[str, Any]) -> list[dict[str, Any]]:
    """The initial state of the optimizer if ``stored`` lacks that of some parameters; else nothing. Plain
    optimizers have none of a parameter before its first gradient."""
    for key, value in stored.items():
        if isinstance(value, dict):
            start, stop = replica.group_bounds[int(key.split(".", 1)[0])]
            if len(value) < sum(start <= part.start < stop for part in replica.slices):
                return initial_state(replica.optimizer, replica.make_optimizer)
    return []


def _restore(replica: Replica, group_state: dict[str, Any], key: str, stored: Any, index: int) -> None:
    """Write an entry of the saved optimizer state into the state of group ``index``."""
    if not torch.is_tensor(group_state[key]):
        group_state[key] = stored
        return
    if isinstance(stored, dict):
        flat = group_state[key].clone()  # parts that were not stored have their initial values
        start = replica.group_bounds[index][0]
        for part in replica.slices:
            if part.name in stored:
                view(flat, part, start).copy_(stored[part.name])
        stored = flat
    group_state[key].copy_(stored)


def _logical(replica: Replica, key: str, value: Any) -> Any:
    """A flat state tensor as named tensors in logical order; other values as they are."""
    index = int(key.split(".", 1)[0])
    start, stop = replica.group_bounds[index]
    if not torch.is_tensor(value) or value.numel() != stop - start or value.dim() != 1:
        return value
    inside = [p for p in replica.slices if start <= p.start and p.stop <= stop]
    return {part.name: view(value, part, start).clone() for part in inside}
