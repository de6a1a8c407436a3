"""A run folder that is moved or removed while its run is going on, and a disk that is full from the start."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from faults.commands import training
from murmurate.training import checkpoint
from waiting import until

_OPTIONS = ("--replicas", 2, "--env-steps", 10**9, "--checkpoint-every-env-steps", 2_000)


def _last(folder: Path) -> int:
    return int(checkpoint.read_manifest(folder / "checkpoints" / "last")["env_steps"])


@pytest.mark.parametrize("strategy", ["gala", pytest.param("parameter-server", marks=pytest.mark.slow)])
def test_a_moved_folder_ends_the_run_which_is_whole_at_its_new_place(strategy: str, tmp_path: Path) -> None:
    with training(tmp_path / "run", "cartpole-gala", *_OPTIONS, "--strategy", strategy) as command:
        command.until_checkpoint()
        steps = _last(command.folder)
        moved = command.folder.rename(tmp_path / "elsewhere")
        command.folder.mkdir()  # what comes to its old place is left alone
        (command.folder / "checkpoints").mkdir()
        assert command.wait() == 1, command.said()
        said = " ".join(command.said().split())
        assert f"was moved to {moved}" in said
        assert f"is kept: murmurate resume {moved}" in said
        assert "Traceback" not in said
        assert [path.name for path in command.folder.rglob("*")] == ["checkpoints"]
    assert _last(moved) >= steps, "the last parameters were saved, too"
    assert (moved / "summary.json").exists()
    assert checkpoint.damage(moved / "checkpoints" / "last") is None


def test_a_removed_folder_ends_the_run_which_says_that_it_is_lost(tmp_path: Path) -> None:
    with training(tmp_path / "run", "cartpole-gala", *_OPTIONS) as command:
        command.until_checkpoint()
        gone = command.folder.rename(tmp_path / "bin")  # at once: what is written meanwhile makes rmtree fail
        until(lambda: _removed(gone), "the folder to be gone")
        assert command.wait() == 1, command.said()
        said = " ".join(command.said().split())
        removed, full = rf"The run folder {command.folder} was removed", rf"Cannot write to {tmp_path}/"
        assert re.search(f"{removed}|{full}", said), said
        assert "Traceback" not in said
        assert "The run is in" not in said
    assert not command.folder.exists(), list(command.folder.rglob("*"))
    assert not gone.exists()


def _removed(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@pytest.mark.parametrize(
    ("limit", "codes"), [(100, [2]), pytest.param(4_000, [1, 2], marks=pytest.mark.slow)]
)
def test_a_start_that_cannot_write_leaves_nothing_half(limit: int, codes: list[int], tmp_path: Path) -> None:
    options = ["cartpole-a2c", "--launcher", "inline", "--updates", "2", "--simulators", "2"]
    command = [sys.executable, "-m", "murmurate", "train", *options, "--out", str(tmp_path / "run")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode in codes, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [] or done.returncode == 1
    if (tmp_path / "run").exists():
        assert "No checkpoint had been saved" in " ".join(done.stderr.split())
