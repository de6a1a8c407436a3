"""One flat vector for each optimizer.

The module's parameters are views into the vector, which is the single parameter of an unmodified
``torch.optim`` optimizer. So an exchange is one tensor, sharing is one buffer, and optimizer state is flat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from murmurate.replica.clipping import NotFinite, check_loss, checked_clip, clip_
from murmurate.replica.layout import (
    check_gradients,
    check_views,
    disable_rnn_flattening,
    grouping,
    lay_out,
    lower_frozen,
    merge,
    place_of,
    refuse_late_hooks,
    view,
)
from murmurate.replica.optimizer_state import (
    MakeOptimizer,
    check_start,
    construct,
    entries,
    make_step,
    materialise,
)
from murmurate.replica.scale import Scale
from murmurate.replica.sparse import Rows, check_plain, check_rows
from murmurate.replica.state_dict import load_into, state_of

__all__ = ["Exchange", "MakeOptimizer", "NotFinite", "Replica", "Rows"]


class Exchange(NamedTuple):
    """The result of one ``strategy.step``.

    round: exchanges of this replica so far (also counted without other replicas).
    heard: number of members whose parameters or gradients entered this step, including its own.
    staleness: own updates since the last agreement; on one shared vector, updates that others made
        to it since this replica read the parameters at which it computed its gradient.
    """

    round: int
    heard: int
    staleness: int


class Replica:
    """A module bound to one flat vector and one optimizer.

    Args:
        name: checkpoint key and metric prefix.
        module: already on its device and in its dtype; its trainable parameters become views.
        make_optimizer: called with ``[vector]``, or with one group per entry of ``groups``.
        groups: for parameter groups, torch's usual dictionaries, for example
            ``lambda m: [{"params": m.body.parameters()}, {"params": m.head.parameters(), "lr": 0.1}]``.
            Each becomes a contiguous slice with its own optimizer group.
        clip: largest global gradient norm; clipping is done in ``update``, so after any averaging.
        schedule: factor on every group's initial learning rate as a function of ``steps_taken()``.
        compute_dtype: if given (``torch.bfloat16``), parameters whose names ``in_compute`` accepts are views
            of a copy in that dtype, refreshed after every step, and have no ``grad`` of their own; the
            vector stays float32. Frozen parameters with such names are rounded.
        shape_aware: give the optimizer the parameters themselves instead of the vector (LAMB, Muon,
            Adafactor); replicas still exchange the vector.

    Attributes:
        params: [N] the vector, an ``nn.Parameter``.
        grad: [N] its gradient, never None; parameters that a loss does not touch have gradient zero
            (Differs: torch leaves None, which skips weight decay and momentum for them).
        scale: the parameters are ``scale * params`` after ``follow`` with ``Rows``, under a strategy that
            keeps scales; else it is 1. ``values`` multiplies it out.
        clock: number of own updates so far.
        loss: [] the loss whose gradient is in ``grad``; None before the first, and after ``follow``.

    Buffers (batch-norm statistics) are not part of the vector. They stay local during training. For
    evaluation and export, floating-point buffers are the mean over the living replicas, and integer buffers
    are those of the living replica with the lowest rank.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        groups: Callable[[nn.Module], Sequence[dict[str, Any]]] | None = None,
        clip: float | None = None,
        schedule: Callable[[int], float] | None = None,
        compute_dtype: torch.dtype | None = None,
        in_compute: Callable[[str], bool] = lambda _: True,
        shape_aware: bool = False,
    ) -> None:
        if shape_aware and compute_dtype is not None:
            raise ValueError("shape_aware optimizers step the parameters themselves: leave out compute_dtype")
        self.name = name
        self.module = module
        self.clip = checked_clip(clip)
        self.schedule = schedule
        self.clock = 0
        self._checked = False  # whether the views were still in place after the first backward
        self.loss: Tensor | None = None
        self.gradient_norm: Tensor | None = None
        self.exchange: Callable[[Replica], Exchange] = _update_alone
        self.on_rewrite: Callable[[], None] = lambda: None
        self._count: Callable[[], int] = lambda: self.clock
        self._pending_rows: Rows | None = None  # the gradient of the next update, if it is row-sparse
        self.common_rounds = True  # whether all replicas make the same rounds; alone, each update is a round
        self.measure = False  # whether the next step sets ``update_norm`` and ``own_gradient``
        self.update_norm: Tensor | None = None
        self.own_gradient: Tensor | None = None  # [N] before averaging
        self.make_optimizer = make_optimizer
        made_groups = grouping(module, groups)
        self.slices, self.group_bounds = lay_out(module, made_groups)
        example = next(p for p in module.parameters() if p.requires_grad)
        total = self.slices[-1].stop
        self._storage = torch.empty(total, dtype=example.dtype, device=example.device)
        self._storage_grad = self._storage.new_zeros(total)
        self.scale = Scale(self._storage)
        for part in self.slices:
            view(self._storage, part).copy_(getattr(part.owner, part.attribute).detach())
        self._gradient_views = [view(self._storage_grad, part) for part in self.slices]
        self._compute_parts = [p for p in self.slices if compute_dtype and in_compute(p.name)]
        self._low_precision = None
        if compute_dtype is not None:
            self._low_precision = self._storage.new_empty(total, dtype=compute_dtype)
            lower_frozen(module, in_compute, compute_dtype)
        self.shape_aware = shape_aware
        self.params = nn.Parameter(self._storage)
        self.params.grad = self._storage_grad
        self._optimizer_slices: list[nn.Parameter] = []
        self._make_views()
        self.optimizer = construct(make_optimizer, self._optimizer_input(made_groups))
        # numbers, as a rate may be a tensor, which changes
        self._initial_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        disable_rnn_flattening(module)

    # -- the vector ---------------------------------------------------------------------------------

    @property
    def grad(self) -> Tensor:
        return self._storage_grad

    def __len__(self) -> int:
        return self._storage.numel()

    @property
    def device(self) -> torch.device:
        return self._storage.device

    def own_parameters(self) -> list[nn.Parameter]:
        return [getattr(part.owner, part.attribute) for part in self.slices]

    def named_views(self, vector: Tensor | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, values in logical order and shape) of each parameter in ``vector`` [N] (default: own)."""
        for part in self.slices:
            yield part.name, view(self._storage if vector is None else vector, part)

    def _optimizer_input(self, made_groups: list[dict[str, Any]]) -> list[Any]:
        """What ``make_optimizer`` is called with. made_groups: see ``grouping``."""
        if self.shape_aware:  # the parameters are views of the vector by now
            return made_groups
        settings = [{k: v for k, v in g.items() if k != "params"} for g in made_groups]
        if settings == [{}]:
            self._optimizer_slices = [self.params]
            return [self.params]
        for start, stop in self.group_bounds:
            piece = nn.Parameter(self._storage[start:stop])
            piece.grad = self._storage_grad[start:stop]
            self._optimizer_slices.append(piece)
        return [{"params": [p], **s} for p, s in zip(self._optimizer_slices, settings, strict=True)]

    def _make_views(self) -> None:
        """Make the module's parameters views of the vector, or of its low-precision copy."""
        low_precision = {part.name for part in self._compute_parts}
        for part in self.slices:
            parameter: nn.Parameter = getattr(part.owner, part.attribute)
            parameter.grad = None  # torch refuses data of another dtype than the gradient's
            if part.name in low_precision and self._low_precision is not None:
                parameter.data = view(self._low_precision, part)
            else:
                parameter.data = view(self._storage, part)
                parameter.grad = view(self._storage_grad, part)
        self.reload()

    def reload(self) -> None:
        """Copy the vector to the low-precision copy, if there is one."""
        if self._low_precision is not None:
            for start, stop in merge(self._compute_parts):
                self._low_precision[start:stop].copy_(self._storage[start:stop])

    def rebind(self, storage: Tensor, optimizer_state: Callable[[str, Tensor], Tensor] | None = None) -> None:
        """Use ``storage`` [N], for example in shared memory, and its contents, from now on.

        optimizer_state: (key, tensor) -> storage for each tensor of the optimizer's state, which is created
        first; the contents of this storage are used. Raises ValueError for another size, dtype or device.
        """
        old = self._storage
        if optimizer_state is not None:
            check_start(self.optimizer, self.make_optimizer)
        if (storage.numel(), storage.dtype, storage.device) != (old.numel(), old.dtype, old.device):
            raise ValueError(
                f"replica '{self.name}' has {old.numel()} parameters of {old.dtype} on {old.device}; "
                f"it cannot use {storage.numel()} of {storage.dtype} on {storage.device}"
            )
        self._storage = self.scale.vector = storage
        self.params.data = storage
        if self._optimizer_slices and self._optimizer_slices[0] is not self.params:
            for piece, (start, stop) in zip(self._optimizer_slices, self.group_bounds, strict=True):
                piece.data = storage[start:stop]
        self._make_views()
        if optimizer_state is not None:
            materialise(self.optimizer, self.make_optimizer)
            for index, (_, state) in enumerate(entries(self.optimizer)):
                for key, value in state.items():
                    if torch.is_tensor(value):
                        state[key] = optimizer_state(f"{index}.{key}", value)

    def check(self) -> None:
        """Raise RuntimeError, naming the parameter, if one is no longer a view into the vector. Usual causes:
        ``zero_grad(set_to_none=True)``, ``module.to(dtype)``, and re-assigning a parameter."""
        if place_of(self.params) != place_of(self._storage):
            raise RuntimeError(
                f"replica '{self.name}' has two vectors, because params was given other memory. Write to it "
                "in place (params.copy_, params.lerp_), or replace all of it with rebind."
            )
        if not self.shape_aware:
            pieces = [parameter for parameter, _ in entries(self.optimizer)]
            check_gradients(self.name, pieces, self._storage_grad, self.group_bounds)
        low_precision = {part.name: self._low_precision for part in self._compute_parts}
        check_views(self.name, self.slices, self._storage, self._storage_grad, low_precision)

    # -- learning -----------------------------------------------------------------------------------

    def descend(self, loss: Tensor) -> Exchange:
        """Compute the gradient of ``loss`` (a scalar) for the own parameters, then make one strategy step.

        Raises NotFinite if the loss is NaN or infinite, before anything was changed.
        """
        check_loss(loss, self.name, self.clock)
        if self.scale.logarithm:
            raise ValueError(
                f"replica '{self.name}' has followed row-sparse gradients, so its module has scaled "
                "parameters: call replica.scale.fold() before computing a loss."
            )
        # autograd.grad, because backward accumulates: clear, add and copy are three passes instead of one
        self.write_gradients(torch.autograd.grad(loss, self.own_parameters(), allow_unused=True))
        self.loss = loss.detach()
        return self._strategy_step()

    @torch.no_grad()
    def write_gradients(self, gradients: Iterable[Tensor | None]) -> None:
        """Make those of the own parameters, in their order, the gradient ``grad``; None stands for zeros."""
        if not self._checked:
            self.check()
            refuse_late_hooks(self.slices)
            self._checked = True
        for target, gradient in zip(self._gradient_views, gradients, strict=True):
            if gradient is None:
                target.zero_()
            else:
                target.copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def follow(self, gradient: Tensor | Rows) -> Exchange:
        """Make one strategy step along a closed-form ``gradient``: [N], or row-sparse (a few rows of it).

        Raises ValueError for a wrong shape, and for rows with an optimizer that is not plain SGD.
        """
        self.loss = None
        if isinstance(gradient, Rows):
            check_rows(gradient, self._storage)
            check_plain(self.optimizer, self.clip, self.name)
            if self.scale.keeps_scale:
                self._pending_rows = gradient
            else:
                self._storage_grad.copy_(gradient.dense(self._storage))
            return self._strategy_step()
        self._fold_scale()
        if gradient.shape != self._storage_grad.shape:
            raise ValueError(f"the gradient has shape {tuple(gradient.shape)}, the vector ({len(self)},)")
        self._storage_grad.copy_(gradient.detach())
        return self._strategy_step()

    @property
    def row_width(self) -> int | None:
        """W of a module whose only parameter is a matrix [V, W]; None for any other."""
        shapes = [part.shape for part in self.slices]
        return shapes[0][1] if len(shapes) == 1 and len(shapes[0]) == 2 else None

    def values(self) -> Tensor:
        """[N] the parameters with their scale multiplied out; the vector itself if the scale is 1."""
        return self.scale.read_consistently(
            lambda scale: self._storage if scale == 1.0 else self._storage * scale
        )

    def _fold_scale(self) -> None:
        """Fold the scale before a dense gradient. Raises ValueError if the vector is shared."""
        if self.scale.logarithm == 0.0:
            return
        if self.scale.shared:
            raise ValueError(
                f"replica '{self.name}' follows row-sparse gradients on a shared vector: use either "
                "row-sparse or dense gradients for all of its steps."
            )
        self.scale.fold()
        self.reload()

    def update(self) -> None:
        """Clip the current gradient, apply the schedule, and make one optimizer step; for strategies."""
        before = self.values().clone() if self.measure else None
        if self._pending_rows is not None:
            rows, self._pending_rows = self._pending_rows, None
            self.scale.step(rows, *self._rates())
        else:
            if self.clip is not None:
                self.gradient_norm = clip_(self._storage_grad, self.clip, self.name, self.clock)
            self._set_rates()
            if any(p.grad is None for group in self.optimizer.param_groups for p in group["params"]):
                self.check()  # it raises, as the optimizer would leave these as they are
            make_step(self.optimizer)
        if before is not None:
            self.update_norm = torch.linalg.vector_norm(self.values() - before)
            self.measure = False
        self.clock += 1

    def step_plainly(self) -> None:
        """Make one step of plain SGD, without clipping or optimizer state, for clients of a parameter server
        between two pulls; it counts as an update."""
        for ends, lr, own in zip(self.group_bounds, self._rates(), self.optimizer.param_groups, strict=True):
            sign, part = 1 if own.get("maximize") else -1, slice(*ends)
            self._storage[part].add_(self._storage_grad[part], alpha=sign * lr)
        self.tick()

    def tick(self) -> None:
        """Count an update that was made without ``update``."""
        self._set_rates()  # for those who record them
        self.measure = False
        self.clock += 1

    def steps_taken(self) -> int:
        """The count that schedules follow: own updates, or the function given to ``count_steps_by``."""
        return self._count()

    def count_steps_by(self, count: Callable[[], int]) -> Callable[[], int]:
        """Make schedules follow ``count()``; returns what they followed before."""
        before, self._count = self._count, count
        return before

    def scale_rates(self, factor: float) -> None:
        """Multiply all learning rates, including the initial ones of the schedule."""
        self._initial_lr = [rate * factor for rate in self._initial_lr]
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def _set_rates(self) -> None:
        if self.schedule is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates(), strict=True):
                group["lr"] = rate

    def _rates(self) -> list[float]:
        factor = 1.0 if self.schedule is None else self.schedule(self.steps_taken())
        return [rate * factor for rate in self._initial_lr]

    def _strategy_step(self) -> Exchange:
        with torch.no_grad():
            if self.measure:
                rows = self._pending_rows
                self.own_gradient = self._storage_grad.clone() if rows is None else rows.dense(self.values())
            exchange = self.exchange(self)
            self.reload()
        return exchange

    # -- state --------------------------------------------------------------------------------------

    @torch.no_grad()
    def rewritten(self) -> None:
        """To be called after other means than a step wrote the vector: strategies may keep one of theirs."""
        self.on_rewrite()
        self.reload()

    def state(self) -> dict[str, Any]:
        """Named parameter tensors in logical order, optimizer state, buffers, clock (all clones)."""
        return state_of(self)

    def load(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned. Raises ValueError naming a parameter that does not fit."""
        load_into(self, state)


def _update_alone(replica: Replica) -> Exchange:
    replica.update()
    return Exchange(round=replica.clock, heard=1, staleness=0)
