"""Shared by model-based agents: learning an ensemble of a world's dynamics, and predicting with it.

Janner et al. 2019, appendix B, and Chua et al. 2018.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from murmurate.agents._ensemble_gradient import EnsembleGradient
from murmurate.agents._running import statistics_group
from murmurate.losses.gaussian_nll import soft_bounds
from murmurate.nets.dynamics import DynamicsEnsemble
from murmurate.ranges import (
    NonNegativeFloat,
    OpenUnitInterval,
    PositiveFloat,
    PositiveInt,
    Range,
    RepeatCount,
)
from murmurate.replica.adam import Adam
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import derive_generator, derive_seed, restore_generator

# Gradient steps for each epoch of patience, at least: the epochs of the first fit, on few transitions, are
# one or two steps long, after five of which the model would have learned nothing.
_LEAST_STEPS = 20
_INTERRUPTED_EVERY = 16  # batches between calls of ``interrupted``
_NEARLY_ONE = 1 - 1e-6


@dataclass(frozen=True)
class ModelConfig:
    """The ensemble and its training; the defaults are those of Janner et al. 2019.

    members: number of nets. elites: how many members predict, those with the least held-out errors.
    layers, hidden: number and width of the hidden layers.
    batch: examples of each member's mini-batches. learning_rate: learning rate of Adam.
    weight_decay: weight decay of the last layer; 1/4 of it in the first, 1/2 in the second, 3/4 in between.
    held_out: share of the data on which the error is measured; held_out_most: largest number of transitions
        held out.
    patience: a fit ends after this many consecutive epochs in which no member's held-out error improved;
        epochs of fewer than 20 gradient steps count in part.
        improvement: an error has improved if it falls below the member's least error by this share.
    precision: precision of the products of fits, but for the outputs; ``auto`` is bfloat16 where the device
        is faster in it. Held-out errors and predictions are float32.
    """

    members: PositiveInt = 7
    elites: PositiveInt = 5
    layers: PositiveInt = 4
    hidden: PositiveInt = 200
    batch: PositiveInt = 256
    learning_rate: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 1e-4
    held_out: OpenUnitInterval = 0.2
    held_out_most: PositiveInt = 5_000
    patience: RepeatCount = 5
    improvement: Annotated[float, Range(0, 1, exclude_most=True)] = 0.01
    precision: Literal["float32", "bfloat16", "auto"] = "auto"

    def decay(self) -> list[float]:
        """The weight decay of each layer."""
        shares = [0.25, 0.5] + [0.75] * self.layers
        return [self.weight_decay * share for share in [*shares[: self.layers], 1.0]]

    def fit_steps(self, transitions: float) -> float:
        """Gradient steps of a fit to so many transitions, for a plan, which cannot know them: it assumes that
        the last improvement comes after as many epochs as then pass without one."""
        held_out = max(1.0, min(transitions * self.held_out, self.held_out_most))
        steps = max(1.0, (transitions - held_out) // self.batch)
        return 2 * self.patience * short_epochs(steps) * steps

    def with_short_fits(self) -> ModelConfig:
        """This config for a measurement of gradient steps: no epoch but the first counts as improved."""
        return replace(self, patience=1, improvement=_NEARLY_ONE)


class DynamicsModel:
    """Learns ``targets`` [N, D] as functions of ``inputs`` [N, I], by the replica ``model``.

    Replicas that make common rounds use the same statistics of inputs, take the same number of steps, and
    stop by the mean of their held-out errors. Other replicas decide alone.

    error: mean squared error of the elites on held-out data; NaN before the first fit. epochs: number of
    epochs of the last fit. loss: mean loss of the members on the last mini-batch.
    """

    def __init__(self, config: ModelConfig, context: Context, inputs: int, outputs: int) -> None:
        self.config, self._context = config, context
        self.ensemble = DynamicsEnsemble(
            inputs,
            outputs,
            members=config.members,
            elites=config.elites,
            layers=config.layers,
            hidden=config.hidden,
            generator=derive_generator(context.seed, "model"),
        ).to(context.device)
        self.replica: Replica = context.replicate(
            "model", self.ensemble, lambda parameters: Adam(parameters, lr=config.learning_rate)
        )
        self.group = statistics_group(context)
        self.error, self.epochs, self.loss = math.nan, 0, math.nan

    @functools.cached_property
    def _generator(self) -> torch.Generator:
        context = self._context
        return derive_generator(context.seed, "fits", context.rank, context.device)

    def predict(self, inputs: Tensor) -> Tensor:
        """Draws [B, D] from the distributions that an elite predicts for each of ``inputs`` [B, I]."""
        ensemble = self.ensemble
        mean, raw = ensemble.predict(inputs, self._generator)
        with torch.no_grad():
            std = torch.exp(soft_bounds(raw, ensemble.low, ensemble.high) / 2)
            return torch.normal(mean, std, generator=self._generator)

    def fit(self, inputs: Tensor, targets: Tensor, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Continue to learn until held-out errors stop falling; then each member has its best parameters.

        interrupted: called every few batches. If it returns True, ``fit`` restores everything to its state
        before the call, except for what the strategy keeps, and returns False; not in a ``group`` of several.
        """
        saved = {"replica": self.replica.state(), **self.state()}
        generator = self._generator
        order = torch.randperm(len(inputs), generator=generator, device=generator.device)
        held_out = max(1, min(int(len(inputs) * self.config.held_out), self.config.held_out_most))
        test_inputs, test_targets = inputs[order[:held_out]], targets[order[:held_out]]
        inputs, targets = inputs[order[held_out:]], targets[order[held_out:]]
        self._standardise_by(inputs)
        inputs = self.ensemble.standardised(inputs).contiguous()
        # each member's bootstrap sample of rows
        member_rows = torch.randint(
            len(inputs), (self.config.members, len(inputs)), generator=self._generator, device=inputs.device
        )
        stopping = EarlyStopping(self.ensemble, self.config)
        config, batch = self.config, min(self.config.batch, len(inputs))
        gradient = EnsembleGradient(self.ensemble, self.replica, config.decay(), batch, config.precision)
        steps = max(1, len(inputs) // batch)
        if self.group.size > 1:  # the same number on all replicas, even if one has less data
            steps = int(self.group.reduce(steps, "max"))
        for epoch in itertools.count(1):  # noqa: B007, epoch is read after the loop
            if self._epoch(gradient, inputs, targets, self._shuffled(member_rows), batch, steps, interrupted):
                clock = self.replica.clock
                self.replica.load(saved.pop("replica"))
                if not self.replica.common_rounds:
                    self.replica.clock = clock  # asynchronous strategies count from their last exchange
                self.replica.rewritten()
                self.load(saved)
                return False
            errors = self.group.mean(self._held_out_errors(test_inputs, test_targets))
            if stopping.after_epoch(errors, steps):
                break
        stopping.restore()
        self.replica.rewritten()
        best = stopping.least.sort()
        self.ensemble.elite.copy_(best.indices[: self.config.elites])
        self.error, self.epochs = float(best.values[: self.config.elites].mean()), epoch
        return True

    def _epoch(
        self,
        gradient: EnsembleGradient,
        inputs: Tensor,
        targets: Tensor,
        member_rows: Tensor,
        batch: int,
        steps: int,
        interrupted: Callable[[], bool],
    ) -> bool:
        """One pass over the rows of each member, [E, N]; returns whether it was interrupted."""
        step, staleness = 0, 0
        while step < steps or (staleness and self.replica.common_rounds):  # until a round ends
            # a member of a group goes on, as the others wait for its part of each mean
            if step % _INTERRUPTED_EVERY == 0 and interrupted() and self.group.size == 1:
                return True
            columns = torch.arange(step * batch, (step + 1) * batch, device=member_rows.device)
            rows = member_rows[:, columns % member_rows.shape[1]].flatten()
            shape = (self.config.members, batch, -1)
            drawn = (data.index_select(0, rows).view(shape) for data in (inputs, targets))
            loss = gradient(*drawn)
            staleness = self.replica.follow(self.replica.grad).staleness
            step += 1
        self.loss = float(loss.mean())
        return False

    def _shuffled(self, member_rows: Tensor) -> Tensor:
        """The members' rows [E, N] in a new order, one for all: their bootstrap samples are independent."""
        generator, size = self._generator, member_rows.shape[1]
        return member_rows.index_select(1, torch.randperm(size, generator=generator, device=generator.device))

    def _standardise_by(self, inputs: Tensor) -> None:
        doubles = inputs.double()
        mean, square = self.group.mean((doubles.mean(0), doubles.square().mean(0)))
        self.ensemble.standardise_by(mean, square - mean.square())

    @torch.no_grad()
    def _held_out_errors(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """[E]: the mean squared error of each member's predicted means."""
        mean, _ = self.ensemble(inputs).chunk(2, -1)
        errors: Tensor = (mean - targets).square().mean((1, 2))
        return errors

    def metrics(self) -> dict[str, float]:
        return {"model_error": self.error, "model_loss": self.loss, "model_epochs": float(self.epochs)}

    def state(self) -> dict[str, Any]:
        figures = {"error": self.error, "loss": self.loss, "epochs": self.epochs}
        return {"generator": saved_generator(self._generator, self._context), **figures}

    def load(self, state: dict[str, Any]) -> None:
        load_generator(self._generator, state["generator"], self._context)
        self.error, self.loss = float(state["error"]), float(state["loss"])
        self.epochs = int(state["epochs"])


def saved_generator(generator: torch.Generator, context: Context) -> dict[str, Any]:
    """The state of a generator of this replica's own."""
    return {"rank": context.rank, "state": generator.get_state()}


def load_generator(generator: torch.Generator, saved: Any, context: Context) -> None:
    """Go on from what ``saved_generator`` returned; a replica that takes over a peer's state draws other
    numbers than the peer."""
    if torch.is_tensor(saved):  # from before the rank was saved
        saved = {"rank": context.rank, "state": saved}
    restore_generator(generator, saved["state"])
    if saved["rank"] != context.rank:
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        generator.manual_seed(derive_seed(seed, "of a peer", context.rank))


def short_epochs(steps: float) -> int:
    """How many epochs of so many gradient steps count as one in the patience."""
    return max(1, math.ceil(_LEAST_STEPS / steps))


class EarlyStopping:
    """Remembers each member's parameters at its least held-out error. least: [E], the least errors."""

    def __init__(self, ensemble: DynamicsEnsemble, config: ModelConfig) -> None:
        self.config, self._epochs_without_improvement = config, 0
        self._parameters = list(ensemble.net.parameters())
        self._best = [parameter.detach().clone() for parameter in self._parameters]
        self.least = torch.full((config.members,), math.inf, device=self._parameters[0].device)

    @torch.no_grad()
    def after_epoch(self, errors: Tensor, steps: int) -> bool:
        """Compare the members' held-out errors [E] with their least after an epoch of so many gradient steps;
        returns whether to stop."""
        improved = errors < self.least * (1 - self.config.improvement)
        self.least = torch.where(improved, errors, self.least)
        for best, parameter in zip(self._best, self._parameters, strict=True):
            best[improved] = parameter[improved]
        self._epochs_without_improvement = 0 if improved.any() else self._epochs_without_improvement + 1
        return self._epochs_without_improvement >= self.config.patience * short_epochs(steps)

    @torch.no_grad()
    def restore(self) -> None:
        """Give each member its best parameters."""
        for best, parameter in zip(self._best, self._parameters, strict=True):
            parameter.copy_(best)
