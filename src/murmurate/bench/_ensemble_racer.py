"""Training steps of an ensemble of 7 nets (4 layers of 200 units, 256 examples for each net), as a racer.

``python -m murmurate.bench._ensemble_racer KIND PRECISION FILE`` learns from random transitions with Hopper's
shapes in one thread, and appends the number of steps to FILE as ``env_steps`` (see ``_racer``). Kinds:
``ours``, epochs of our fit, without evaluating the held-out error; ``autograd``, the same in float32, with
the gradient by autograd; ``limit``, only the matrix products of a step, all of them in PRECISION.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from murmurate.agents._dynamics import DynamicsModel, ModelConfig
from murmurate.agents._ensemble_gradient import EnsembleGradient
from murmurate.bench._racer import write_progress
from murmurate.launch.role import prepare_process
from murmurate.losses.gaussian_nll import gaussian_nll, soft_bounds
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import EnvSpec

SPEC = EnvSpec("hopper", (11,), torch.float32, 0, (3,))
INPUTS, OUTPUTS, ROWS = 14, 12, 12_800


def fit(precision: str) -> Callable[[], int]:
    """A function that runs an epoch of our fit, and returns its number of steps."""
    config = ModelConfig(precision=precision)  # type: ignore[arg-type]
    model = DynamicsModel(config, Context(SPEC, Replica, seed=0), INPUTS, OUTPUTS)
    inputs, targets, member_rows = _data(config.members)
    gradient = EnsembleGradient(model.ensemble, model.replica, config.decay(), config.batch, precision)

    def epoch() -> int:
        steps, rows = ROWS // config.batch, model._shuffled(member_rows)
        model._epoch(gradient, inputs, targets, rows, config.batch, steps, lambda: False)
        return steps

    return epoch


def autograd(precision: str) -> Callable[[], int]:
    """As ``fit``, with ``Replica.descend`` for each step. Raises ValueError unless ``precision`` is
    float32."""
    if precision != "float32":
        raise ValueError("the gradient by autograd is measured in float32")
    config = ModelConfig(precision="float32")
    model = DynamicsModel(config, Context(SPEC, Replica, seed=0), INPUTS, OUTPUTS)
    ensemble, decay = model.ensemble, config.decay()
    inputs, targets, member_rows = _data(config.members)

    def step(rows: Tensor) -> None:
        mean, raw = ensemble.net(inputs[rows]).chunk(2, -1)
        log_variance = soft_bounds(raw, ensemble.low, ensemble.high)
        loss = gaussian_nll(mean, log_variance, targets[rows]).sum()
        loss = loss + 0.01 * (ensemble.high - ensemble.low).sum()
        for weight, coefficient in zip(ensemble.net.weights, decay, strict=True):
            loss = loss + coefficient * weight.square().sum() / 2
        model.replica.descend(loss)

    def epoch() -> int:
        for rows in torch.split(model._shuffled(member_rows), config.batch, 1):
            step(rows)
        return ROWS // config.batch

    return epoch


def limit(precision: str) -> Callable[[], int]:
    """A function that multiplies random matrices as a step does: forward, and backward for the weights of all
    layers and for the inputs of all layers but the first."""
    config = ModelConfig()
    widths = [INPUTS, *[config.hidden] * config.layers, 2 * OUTPUTS]
    dtype: torch.dtype = getattr(torch, precision)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(config.members, *shape).to(dtype)

    activations, gradients = ([drawn(config.batch, w) for w in widths] for _ in range(2))
    weights = [drawn(a, b) for a, b in itertools.pairwise(widths)]

    def step() -> int:
        for i, weight in enumerate(weights):
            torch.bmm(activations[i], weight)
        for i, weight in enumerate(weights):
            torch.bmm(activations[i].transpose(1, 2), gradients[i + 1])
            if i:
                torch.bmm(gradients[i + 1], weight.transpose(1, 2))
        return 1

    return step


KINDS = {"ours": fit, "autograd": autograd, "limit": limit}


def _data(members: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [ROWS, INPUTS], targets [ROWS, OUTPUTS], and the row numbers of each member's bootstrap sample
    [members, ROWS]."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(ROWS, width, generator=generator) for width in (INPUTS, OUTPUTS))
    return inputs, targets, torch.randint(ROWS, (members, ROWS), generator=generator)


def main(kind: str, precision: str, progress: Path) -> None:
    prepare_process(1)  # as learners do
    write_progress(progress, KINDS[kind](precision))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
