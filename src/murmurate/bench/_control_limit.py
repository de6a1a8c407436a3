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
    """One MLP of ``members``: random inputs of each layer, weights and gradients behind each layer."""

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
        """The gradients of the layers' inputs; first: also of the first layer's."""
        for slope, weight in list(zip(self.slopes, self.weights, strict=True))[0 if first else 1 :]:
            torch.bmm(slope[:members], weight[:members].transpose(1, 2))

    def of_weights(self) -> None:
        for seen, slope in zip(self.seen, self.slopes, strict=True):
            torch.bmm(seen.transpose(1, 2), slope)


def main(algorithm: str, dtype: torch.dtype, progress: Path) -> None:
    torch.set_num_threads(1)
    bench, written_at = os.getppid(), time.monotonic()
    policy = Products(1, (OBSERVED, HIDDEN, HIDDEN, ACTIONS * (1 if algorithm == "td3" else 2)), dtype)
    critics = Products(2, (OBSERVED + ACTIONS, HIDDEN, HIDDEN, 1), dtype)
    judging = 1 if algorithm == "td3" else 2  # critics that judge the policy's actions
    progress.parent.mkdir(parents=True, exist_ok=True)
    with open(progress, "a", buffering=1) as file:
        for update in itertools.count(1):
            policy.forward(1)  # target actions
            critics.forward(2)  # their values
            critics.forward(2)
            critics.of_inputs(2, first=False)
            critics.of_weights()
            if algorithm == "sac" or update % 2 == 0:
                policy.forward(1)
                critics.forward(judging)
                critics.of_inputs(judging, first=True)
                policy.of_inputs(1, first=False)
                policy.of_weights()
            now = time.monotonic()
            if now - written_at > _LINE_SECONDS:
                written_at = now
                file.write(json.dumps({"env_steps": update}) + "\n")
                if os.getppid() != bench:
                    return


if __name__ == "__main__":
    main(sys.argv[1], getattr(torch, sys.argv[2]), Path(sys.argv[3]))
