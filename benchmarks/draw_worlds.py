"""Draws what an agent observes in worlds: ``python benchmarks/draw_worlds.py OUT.png [WORLD...]``.

For each world, it shows the newest image of the observation after 40 random actions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from murmurate.sources.steps import random_actions
from murmurate.worlds.registry import world

WORLDS = ("doom-my-way-home", "doom-corridor-plus", "doom-corridor-plus-occluded", "pong-occluded", "maze-l5")


def main(out: Path, names: Sequence[str]) -> Path:
    figure, axes = plt.subplots(1, len(names), figsize=(2.4 * len(names), 2.7), squeeze=False)
    for name, axis in zip(names, axes[0], strict=True):
        simulators = world(name).open(1, training=True)
        step, generator = simulators.reset(4), torch.Generator().manual_seed(0)
        for _ in range(40):
            simulators.send(random_actions(simulators.spec, step.observation, generator))
            step = simulators.receive()
        newest = step.observation[0, -simulators.spec.channels :].permute(1, 2, 0)
        simulators.close()
        axis.imshow(newest.squeeze(-1).numpy(), cmap="gray")
        axis.set_title(name, fontsize=9)
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    return out


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2:] or WORLDS))
