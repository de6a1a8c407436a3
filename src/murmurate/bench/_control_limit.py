"""The products of an update of TD3 or SAC and nothing else, as a racer.

``python -m murmurate.bench._control_limit td3|sac float32|bfloat16 FILE`` multiplies matrices of random
numbers of the shapes of HalfCheetah with two layers of 256 units and batches of 256, the twin critics as one
batched product, in one thread, and appends the number of updates to FILE as ``env_steps``. No activations,
losses, optimizer, replay or simulator. In bfloat16 all products are of that dtype.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

BATCH, OBSERVED, ACTIONS, HIDDEN = 256, 17, 6, 256
_LINE_SECONDS = 0.25


class Products:
    """An ensemble of ``members`` MLPs: for each layer random inputs, weights, and gradients of its
    outputs."""

    def __init__(self, members: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(members, *shape, generator=generator).to(dtype)

        self.seen = [drawn(BATCH, size) for size in sizes[:-1]]
        self.weights = [drawn(a, b) for a, b in itertools.pairwise(sizes)]
        self.slopes = [drawn(BATCH, size) for size in sizes[1:]]

    def forward(self, members: int) -> None:
        for seen, weight in zip(self.seen, self.weights, strict=True):
            torch.bmm(seen[:members], weight[:members])

    def of_inputs(self, members: int, first: bool) -> None:
        """Compute the gradients of the layers' inputs. first: including those of the first layer."""
        for slope, weight in list(zip(self.slopes, self.weights, strict=True))[0 if first else 1 :]:
            torch.bmm(slope[:members], weight[:members].transpose(1, 2))

    def of_weights(self) -> None:
        for seen, slope in zip(self.seen, self.slopes, strict=True):
            torch.bmm(seen.transpose(1, 2), slope)


class Update:
    """The products of an update of ``td3`` or ``sac``."""

    def __init__(self, algorithm: str, dtype: torch.dtype) -> None:
        actions = ACTIONS * (1 if algorithm == "td3" else 2)
        self.policy = Products(1, (OBSERVED, HIDDEN, HIDDEN, actions), dtype)
        self.critics = Products(2, (OBSERVED + ACTIONS, HIDDEN, HIDDEN, 1), dtype)
        self.delay = 2 if algorithm == "td3" else 1
        self.judging_critics = 1 if algorithm == "td3" else 2

    def __call__(self, number: int) -> None:
        self.policy.forward(1)  # target actions
        self.critics.forward(2)  # their values
        self.critics.forward(2)
        self.critics.of_inputs(2, first=False)
        self.critics.of_weights()
        if number % self.delay == 0:
            self.policy.forward(1)
            self.critics.forward(self.judging_critics)
            self.critics.of_inputs(self.judging_critics, first=True)
            self.policy.of_inputs(1, first=False)
            self.policy.of_weights()


def main(algorithm: str, dtype: torch.dtype, progress: Path) -> None:
    torch.set_num_threads(1)
    bench, written_at = os.getppid(), time.monotonic()
    update = Update(algorithm, dtype)
    progress.parent.mkdir(parents=True, exist_ok=True)
    with open(progress, "a", buffering=1) as file:
        for number in itertools.count(1):
            update(number)
            now = time.monotonic()
            if now - written_at > _LINE_SECONDS:
                written_at = now
                file.write(json.dumps({"env_steps": number}) + "\n")
                if os.getppid() != bench:
                    return


if __name__ == "__main__":
    main(sys.argv[1], getattr(torch, sys.argv[2]), Path(sys.argv[3]))
