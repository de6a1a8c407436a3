"""TD3 or SAC of SBX (JAX) on HalfCheetah, for ``murmurate bench control-throughput`` (see README.md).

``control.py td3|sac FILE`` appends the number of env steps, each with one update, to FILE.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ["NPROC"] = os.environ["PJRT_NPROC"] = "1"  # read when jax starts: the size of its thread pools

import gymnasium
from sbx import SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback

_LINE_SECONDS = 0.5


class ProgressFile(BaseCallback):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.bench, self.written_at = os.getppid(), time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "a", buffering=1)  # noqa: SIM115

    def _on_step(self) -> bool:
        now = time.monotonic()
        if now - self.written_at > _LINE_SECONDS:
            self.written_at = now
            self.file.write(json.dumps({"env_steps": self.num_timesteps}) + "\n")
        return os.getppid() == self.bench


def main(algorithm: str, path: Path) -> None:
    learner = {"td3": TD3, "sac": SAC}[algorithm](
        "MlpPolicy",
        gymnasium.make("HalfCheetah-v5"),
        buffer_size=200_000,
        batch_size=256,
        learning_starts=1_000,
        train_freq=1,
        gradient_steps=1,
        learning_rate=3e-4,
        policy_kwargs={"net_arch": [256, 256]},
        seed=0,
    )
    learner.learn(1_000_000_000, callback=ProgressFile(path))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
