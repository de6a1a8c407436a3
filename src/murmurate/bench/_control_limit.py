"""The matrix products of an update of TD3 or SAC and nothing else, as a racer (see ``_racer``).

``python -m murmurate.bench._control_limit td3|sac float32|bfloat16 FILE`` multiplies random matrices in one
thread, with the shapes of HalfCheetah, two layers of 256 units and batches of 256; each product of the twin
critics is one batched product, computed as in ``nets.passes``. The number of updates is appended to FILE as
``env_steps``, because agents make one update per env step. There are no activations, losses, optimizer,
replay or simulator. With bfloat16, all products are in that dtype.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from torch import Tensor

from murmurate.bench._racer import write_progress
from murmurate.launch.role import prepare_process
from murmurate.nets.passes import product

BATCH, OBSERVED, ACTIONS, HIDDEN = 256, 17, 6, 256  # batch size; widths of observation, action, hidden layer


class Products:
    """The products of an ensemble of ``members`` MLPs, with random inputs, weights and output gradients of
    each layer."""

    def __init__(self, members: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(members, *shape, generator=generator).to(dtype)

        self.inputs = [drawn(BATCH, size) for size in sizes[:-1]]
        self.weights = [drawn(a, b) for a, b in itertools.pairwise(sizes)]
        self.output_gradients = [drawn(BATCH, size) for size in sizes[1:]]

    def forward(self, members: int) -> None:
        for inputs, weight in zip(self.inputs, self.weights, strict=True):
            product(inputs[:members], weight[:members])

    def input_gradients(self, members: int, *, of_actions: bool = False) -> None:
        """Compute the gradients of the layers' inputs. of_actions: including those of the actions among the
        inputs of the first layer."""
        layers = list(zip(self.output_gradients, self.weights, strict=True))
        for gradient, weight in layers[1:]:
            product(gradient[:members], weight[:members].transpose(1, 2))
        if of_actions:
            gradient, weight = layers[0]
            product(gradient[:members], weight[:members, OBSERVED:].transpose(1, 2))

    def weight_gradients(self) -> None:
        for inputs, gradient in zip(self.inputs, self.output_gradients, strict=True):
            product(inputs.transpose(1, 2), gradient)


class UpdateProducts:
    """The products of an update of ``td3`` or ``sac``."""

    def __init__(self, algorithm: str, dtype: torch.dtype) -> None:
        policy_outputs = ACTIONS * (1 if algorithm == "td3" else 2)  # sac: a mean and a deviation of each
        self.policy = Products(1, (OBSERVED, HIDDEN, HIDDEN, policy_outputs), dtype)
        self.critics = Products(2, (OBSERVED + ACTIONS, HIDDEN, HIDDEN, 1), dtype)
        self.policy_delay = 2 if algorithm == "td3" else 1
        self.critics_in_policy_loss = 1 if algorithm == "td3" else 2
        self.updates = 0

    def __call__(self) -> int:
        self.updates += 1
        self.policy.forward(1)  # target actions
        self.critics.forward(2)  # values of the target actions
        self.critics.forward(2)
        self.critics.input_gradients(2)
        self.critics.weight_gradients()
        if self.updates % self.policy_delay == 0:
            self.policy.forward(1)
            self.critics.forward(self.critics_in_policy_loss)
            # each row of a batch follows one critic: the first, or for sac the one with the smaller value
            self.critics.input_gradients(1, of_actions=True)
            self.policy.input_gradients(1)
            self.policy.weight_gradients()
        return 1


def main(algorithm: str, dtype: torch.dtype, progress: Path) -> None:
    prepare_process(1)  # as learners do
    write_progress(progress, UpdateProducts(algorithm, dtype))


if __name__ == "__main__":
    main(sys.argv[1], getattr(torch, sys.argv[2]), Path(sys.argv[3]))
