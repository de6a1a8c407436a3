"""A script with a DataLoader of two workers, as docs/replicator.md shows it: plain, and under torchrun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
STRATEGIES = ["all-reduce", "local-sgd", "gala", "parameter-server"]


def right_percent(folder: Path, strategy: str, engine: list[str]) -> int:
    """What the script prints: the share of unseen points that it tells apart."""
    script = Path(shutil.copy(ROOT / "examples" / "loader_replicated.py", folder))
    before = script.read_text()
    script.write_text(before.replace('strategy="all-reduce"', f'strategy="{strategy}"'))
    assert strategy == "all-reduce" or script.read_text() != before
    command = [sys.executable, *engine, script.name]
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()  # one replica prints
    found = re.fullmatch(r"loss [\d.]+, (\d+)% right on points it has not seen", line)
    assert found, line
    return int(found[1])


@pytest.mark.parametrize(
    ("engine", "strategy"),
    [
        pytest.param(engine, strategy, marks=() if first and strategy == "gala" else pytest.mark.slow)
        for engine, first in (([], True), (TORCHRUN, False))
        for strategy in STRATEGIES
    ],
    ids=lambda value: value if isinstance(value, str) else ("torchrun" if value else "plain"),
)
def test_it_learns_under(engine: list[str], strategy: str, tmp_path: Path) -> None:
    assert right_percent(tmp_path, strategy, engine) >= 90


def test_the_documentation_names_the_script_and_both_commands() -> None:
    page = (ROOT / "docs" / "replicator.md").read_text()
    for words in ("examples/loader_replicated.py", "torchrun --nproc-per-node 2", "num_workers=2"):
        assert words in page
