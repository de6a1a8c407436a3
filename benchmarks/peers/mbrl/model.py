"""The ensemble of mbrl-lib's MBPO on random data, for ``murmurate bench model-ensemble`` (see README.md).

``model.py FILE`` appends the number of training steps to FILE.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from mbrl.models import GaussianMLP, ModelTrainer, OneDTransitionRewardModel
from mbrl.types import TransitionBatch
from mbrl.util.replay_buffer import BootstrapIterator

_LINE_SECONDS = 0.5
OBSERVED, ACTIONS, ROWS, BATCH = 11, 3, 12_800, 256


def main(path: Path) -> None:
    torch.set_num_threads(1)
    net = GaussianMLP(
        OBSERVED + ACTIONS,
        OBSERVED + 1,
        device="cpu",
        num_layers=4,
        ensemble_size=7,
        hid_size=200,
        activation_fn_cfg={"_target_": "torch.nn.SiLU"},
    )
    model = OneDTransitionRewardModel(net, target_is_delta=True, normalize=True, num_elites=5)
    trainer = ModelTrainer(model, optim_lr=1e-3, weight_decay=5e-5)
    generator = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return generator.normal(size=(ROWS, *shape)).astype(np.float32)

    ended = np.zeros(ROWS, bool)
    data = TransitionBatch(drawn(OBSERVED), drawn(ACTIONS), drawn(OBSERVED), drawn(), ended, ended)
    batches = BootstrapIterator(data, BATCH, ensemble_size=7, shuffle_each_epoch=True, rng=generator)
    model.update_normalizer(data)
    bench, written_at, steps = os.getppid(), time.monotonic(), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", buffering=1) as file:
        while os.getppid() == bench:
            for batch in batches:
                model.update(batch, trainer.optimizer)
                steps += 1
                if time.monotonic() - written_at > _LINE_SECONDS:
                    written_at = time.monotonic()
                    file.write(json.dumps({"env_steps": steps}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
