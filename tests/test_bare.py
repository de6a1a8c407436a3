"""With the core's dependencies alone all works that needs no more, as the README's first command does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_BARE = """
import sys
extras = "cryptography ray ale_py mujoco cv2 imageio imageio_ffmpeg pygame stable_baselines3 scipy sklearn"
for name in extras.split():
    sys.modules[name] = None  # an import of it fails
from murmurate.cli.main import main
for what in ("launchers", "recipes", "strategies", "fabrics", "agents", "benches"):
    assert main(["list", what]) == 0, what
assert main(["doctor"]) == 0
short = ["--launcher", "inline", "--updates", "2", "--replicas", "2", "--eval-episodes", "1"]
sys.exit(main(["train", "cartpole-gala", *short, "--out", sys.argv[1]]))
"""


def test_the_core_needs_no_extra(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _BARE, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "summary.json").exists()
