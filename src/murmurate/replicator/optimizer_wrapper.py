"""Wraps the optimizer of a script, so that ``step()`` runs the strategy's update (TF-Replicator's
``wrap_optimizer``)."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from murmurate.errors import Refusal
from murmurate.replica.layout import disable_rnn_flattening, place_of
from murmurate.replica.optimizer_state import initial_state
from murmurate.replica.vector import Exchange, Replica

_NOWHERE: Mapping[str, Any] = {}  # for parameters of no known module
MARK = "_is_wrapped_by_murmurate"


class ParameterModule(nn.Module):
    """A module with given parameters, by name, and the buffers that another module has at the time."""

    def __init__(self, buffers_of: nn.Module | None = None) -> None:
        super().__init__()
        # a method, as an attribute that is a module would be a part of this one
        self._other_buffers = None if buffers_of is None else buffers_of.named_buffers

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        if self._other_buffers is not None:
            yield from self._other_buffers(prefix, recurse, remove_duplicate)

    @classmethod
    def of(cls, named: Mapping[str, nn.Parameter], buffers_of: nn.Module | None = None) -> ParameterModule:
        module = cls(buffers_of)
        for name, parameter in named.items():
            *path, attribute = name.split(".")
            owner: nn.Module = module
            for child in path:
                if child not in owner._modules:
                    owner.add_module(child, nn.Module())
                owner = owner.get_submodule(child)
            owner.register_parameter(attribute, parameter)
        return module


def parameter_module(optimizer: torch.optim.Optimizer, module: nn.Module | None) -> ParameterModule:
    """A module with the optimizer's parameters, by their names in ``module``, and the module's buffers."""
    names = {} if module is None else {id(p): name for name, p in module.named_parameters()}
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    if module is not None:
        disable_rnn_flattening(module)
    return ParameterModule.of({names.get(id(p), str(number)): p for number, p in enumerate(owned)}, module)


def optimizer_factory(optimizer: torch.optim.Optimizer) -> Callable[[list[Any]], torch.optim.Optimizer]:
    """A ``make_optimizer`` that first returns the script's optimizer with new parameters, and then copies of
    it.

    It returns the script's object, so that its learning-rate schedulers keep working.
    """
    called = False

    def make(groups: list[Any]) -> torch.optim.Optimizer:
        nonlocal called
        if called:
            return copy_of(optimizer, groups)
        called = True
        for group, new in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = new["params"]
        # some optimizers (Adagrad) create state in the constructor: create it for the slices of the vector
        fresh = copy_of(optimizer, [dict(group) for group in optimizer.param_groups])
        optimizer.state.clear()
        optimizer.state.update(fresh.state)
        return optimizer

    return make


def copy_of(optimizer: torch.optim.Optimizer, groups: list[Any]) -> torch.optim.Optimizer:
    """A new optimizer of the same class, with the same defaults, for other groups."""
    kind = type(optimizer)
    options = inspect.signature(kind.__init__).parameters
    return kind(groups, **{k: v for k, v in optimizer.defaults.items() if k in options})


def refuse_schedulers(replica: Replica, optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Make the replica's steps raise Refusal once a scheduler has changed its learning rates, if the
    optimizer runs only on the centre, which does not see these rates."""
    exchange, initial = replica.exchange, [float(g["lr"]) for g in optimizer.param_groups]
    has_stepped = False

    def note_step(*_: Any) -> None:
        nonlocal has_stepped
        has_stepped = True

    optimizer.register_step_post_hook(note_step)

    def exchange_unless_scheduled(replica: Replica) -> Exchange:
        made = exchange(replica)
        if not has_stepped and [float(g["lr"]) for g in optimizer.param_groups] != initial:
            raise Refusal(
                f"under {strategy} the centre (the parameter server's process) applies the updates, and a "
                "replica's learning-rate scheduler does not reach it. Give wrap_optimizer a "
                "schedule: a factor as a function of the updates."
            )
        return made

    replica.exchange = exchange_unless_scheduled


def skip_overflows(replica: Replica) -> None:
    """Let updates along a gradient that is not finite change nothing but the clock, as a gradient scaler
    does. The average of all-reduce is not finite if one member's gradient is not, so all skip it."""
    if hasattr(replica.update, "skips_overflows"):
        return
    update = replica.update

    def update_if_finite() -> None:
        if bool(replica.grad.isfinite().all()):
            update()
        else:
            replica.tick()

    update_if_finite.skips_overflows = True  # type: ignore[attr-defined]
    replica.update = update_if_finite  # type: ignore[method-assign]


class WrappedOptimizer(torch.optim.Optimizer):
    """Behaves like the optimizer that it wraps, except that ``step()`` runs the strategy's update.

    ``param_groups``, ``state`` and ``defaults`` are the wrapped optimizer's, whose parameters are now slices
    of the flat vector of ``replica``. ``last`` is the result of the last step: how many members took part in
    it, and how stale it was (see ``Exchange``).

    waits: whether replicas wait for one another, so that all must make the same number of steps. parts:
    number of processes that share a replica.

    Differs: a parameter that the loss does not touch has gradient zero instead of None (see ``Replica``).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        replica: Replica,
        module: nn.Module | None = None,
        waits: bool = False,
        parts: int = 1,
    ) -> None:
        # no super().__init__(): all attributes are the wrapped optimizer's
        self.optimizer = optimizer
        setattr(optimizer, MARK, True)
        self.replica = replica
        self.last: Exchange | None = None
        self._waits, self._parts = waits, parts
        self._is_stepping = False  # whether a step of this object is being made
        self._counts = [  # of the parameters in each group
            sum(start <= p.start < stop for p in replica.slices) for start, stop in replica.group_bounds
        ]
        owners = {} if module is None else _owners(module)
        # each parameter with its name, the parameters of the module that owns it and its name among these,
        # and with the place of its values and the view of its gradient, which do not change
        self._parameters = [
            (parameter, name, *owners.get(id(parameter), (_NOWHERE, "")), place_of(values), gradient)
            for parameter, (name, values), (_, gradient) in zip(
                replica.own_parameters(),
                replica.named_views(),
                replica.named_views(replica.grad),
                strict=True,
            )
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups, whose gradients are those of the module's parameters: a script may
        clip them after ``module.zero_grad()``, which detached these."""
        self._attach_gradients()
        return self.optimizer.param_groups

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Refusal(
            "a wrapped optimizer cannot be copied or pickled, as it is bound to the channels of this run. "
            "Keep its state_dict(), which a plain or a wrapped optimizer loads; a module can be copied."
        )

    def refuse_plain_steps(self) -> None:
        """Make steps of the wrapped optimizer itself raise Refusal: they would not be exchanged."""

        def refuse(*_: Any) -> None:
            if not self._is_stepping:
                raise Refusal(
                    "step() was called on the optimizer that was wrapped, so the replicas do not agree. Keep "
                    "what wrap_optimizer returns: optimizer = replicator.wrap_optimizer(optimizer, ...)."
                )

        self.optimizer.register_step_pre_hook(refuse)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by ``torch.amp.GradScaler.step``, which then leaves unscaling and skipping to ``step``: it
        sets ``found_inf``, and ``grad_scale``, None if the script has unscaled the gradient. Raises Refusal
        for a replica of several parts."""
        if self._parts > 1:
            raise Refusal(
                "a GradScaler would skip the steps of one part of a replica alone. Use torch.autocast with "
                "dtype=torch.bfloat16, which needs no scaler."
            )
        return True

    def __repr__(self) -> str:
        return f"WrappedOptimizer({self.optimizer!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradient in place, whatever ``set_to_none`` is."""
        self._attach_gradients()
        self.replica.grad.zero_()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the strategy on the present gradient; returns the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._attach_gradients()
        if len(self.optimizer.param_groups) != len(self.replica.group_bounds):
            raise Refusal("a parameter group was added after wrapping: add all groups before wrapping")
        for parameter, name, *_ in self._parameters:
            if not parameter.requires_grad:
                raise Refusal(
                    f"'{name}' was frozen (requires_grad_(False)) after its optimizer was wrapped, and "
                    "weight decay and momentum would still move it. Freeze it before, and leave it out of "
                    "the optimizer's groups; or give it an optimizer of its own, and do not step that one."
                )
        if "found_inf" in vars(self) and self._skips_scaled_step():
            return loss
        self._is_stepping = True
        try:
            self.last = self.replica.follow(self.replica.grad)
        finally:
            self._is_stepping = False
        # a scheduler that was made with the plain optimizer looks for this, and warns without it
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _skips_scaled_step(self) -> bool:
        """Unscale the gradient, as ``torch.amp.GradScaler`` asks. If it has overflowed: whether the step is
        left out; where replicas wait for one another it is made all the same, along a gradient of NaN, which
        changes no replica's parameters by its optimizer."""
        scale: Tensor | None = vars(self)["grad_scale"]
        if scale is not None:
            self.replica.grad.div_(scale.to(self.replica.device))
        if self._waits:
            skip_overflows(self.replica)
        if not float(vars(self)["found_inf"]):
            return False
        self.replica.grad.fill_(torch.nan)  # what was clipped since may be finite
        return not self._waits

    def _attach_gradients(self) -> None:
        """Make all gradients views of the flat gradient again, as ``module.zero_grad()`` replaces them by
        None."""
        with torch.no_grad():
            for parameter, name, owner, attribute, place, view in self._parameters:
                # a conversion gives a parameter other memory, or the module another parameter
                if place_of(parameter) != place or owner.get(attribute, parameter) is not parameter:
                    raise Refusal(
                        f"the module of '{name}' was moved or converted (.to, .cuda, .double, .half), or the "
                        "parameter replaced, after its optimizer was wrapped. Do that first, then make the "
                        "optimizer and wrap it."
                    )
                gradient = parameter.grad
                if gradient is None:
                    view.zero_()
                elif gradient.is_sparse:  # of an embedding, after ``module.zero_grad()``
                    view.copy_(gradient.to_dense())
                elif place_of(gradient) == place_of(view):
                    continue
                else:
                    view.copy_(gradient)
                parameter.grad = view

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise Refusal("a wrapped optimizer takes no further parameters: add the group before wrapping")

    def state_dict(self) -> dict[str, Any]:
        """The state in the format of the plain optimizer, which can load it. On parts of a replica but the
        first, which make no steps of their own, it has no moments."""
        replica = self.replica
        saved = replica.state()["optimizer"]
        groups, state, first_index = [], {}, 0
        for number, (group, count) in enumerate(zip(self.optimizer.param_groups, self._counts, strict=True)):
            indices = list(range(first_index, first_index + count))
            settings = {k: v for k, v in group.items() if k != "params"}
            groups.append(settings | {"params": indices})
            for index in indices:
                parameter_state = {
                    key.split(".", 1)[1]: _state_of_parameter(value, replica.slices[index].name)
                    for key, value in saved.items()
                    if key.startswith(f"{number}.")
                }
                if parameter_state:
                    state[index] = parameter_state
            first_index += count
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this or of the plain optimizer.

        Raises ValueError if the groups hold other numbers of parameters.
        """
        replica, stored = self.replica, state_dict["state"]
        initial = functools.cache(lambda: initial_state(replica.optimizer, replica.make_optimizer))
        loaded: dict[str, Any] = {}
        groups = copy.deepcopy(state_dict["param_groups"])  # a rate may be a tensor
        if (counts := self._counts) != [len(g["params"]) for g in groups]:
            raise ValueError(f"the state has groups of other sizes than {counts}: it is of another model")
        for number, (group, own_group) in enumerate(zip(groups, self.optimizer.param_groups, strict=True)):
            own_group.update({k: v for k, v in group.items() if k != "params"})
            for index in group["params"]:
                for key, value in stored.get(index, {}).items():
                    part = replica.slices[index]
                    is_slice = torch.is_tensor(value) and value.shape == part.shape and key != "step"
                    if is_slice and not part.shape:  # counters have no dimension, either
                        is_slice = initial()[number][key].dim() == 1
                    if is_slice:
                        loaded.setdefault(f"{number}.{key}", {})[part.name] = value
                    else:
                        loaded[f"{number}.{key}"] = value
        rates = [g["lr"] for g in self.optimizer.param_groups]
        # without the parameters, which other replicas may be writing to
        replica.load(replica.state() | {"params": None, "optimizer": loaded, "learning_rates": rates})


def _owners(module: nn.Module) -> dict[int, tuple[Mapping[str, Any], str]]:
    """By the id of a parameter: (the parameters of the module that owns it, its name among them)."""
    return {
        id(parameter): (inner._parameters, name)
        for inner in module.modules()
        for name, parameter in inner._parameters.items()
        if parameter is not None
    }


def _state_of_parameter(value: Any, name: str) -> Any:
    """One parameter's part of a group's state: its slice of a moment estimate (Adam's ``exp_avg``), or a copy
    of a counter."""
    if isinstance(value, dict):
        return value[name]
    return value.clone() if torch.is_tensor(value) else value
