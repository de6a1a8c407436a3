"""Mesa, which draws environments by software, and Triton each bring an LLVM; Triton must come first."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

_DRAWN = """
import gymnasium
import numpy as np


class Pictures(gymnasium.ObservationWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(0, 255, (48, 48, 3), np.uint8)

    def observation(self, observation):
        return np.ascontiguousarray(self.env.render()[::10, ::10])


def make():
    return Pictures(gymnasium.make("InvertedPendulum-v5", render_mode="rgb_array"))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="mujoco is not installed")
def test_an_environment_that_draws_trains_in_the_process_that_learns(tmp_path: Path) -> None:
    """There torch's compiler, which imports Triton, may come after the first picture."""
    (tmp_path / "drawn.py").write_text(_DRAWN)
    short = "--launcher inline --simulators 1 --updates 1 --env-steps none --agent.steps 2 --eval-episodes 1"
    short += " --eval-max-env-steps 3"
    words = ["train", "env:drawn.py:make-a2c", *short.split(), "--out", "run"]
    code = f"from murmurate.cli.main import main\nassert main({words}) == 0\nimport torch._dynamo"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "MUJOCO_GL": "egl"},
        capture_output=True,
        text=True,
    )
    # LLVM ends the process by a signal
    if done.returncode > 0 and ("cannot draw" in done.stderr or "EGL" in done.stderr):
        pytest.skip("nothing draws here")
    assert done.returncode == 0, done.stderr[-500:]
    assert (tmp_path / "run" / "summary.json").is_file()
