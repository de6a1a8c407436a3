"""What goes wrong after a run has begun: exit code 1, a sentence, and the last good checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from faults.commands import trained, training
from murmurate.training import checkpoint
from waiting import until

pytestmark = pytest.mark.timeout(900)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    options = ("--replicas", 2, "--env-steps", 10**9, "--checkpoint-every-env-steps", 4_000)
    with training(tmp_path / "run", "cartpole-gala", *options, "--record-every-seconds", 1e-9) as command:
        command.until_checkpoint()
        written = (command.folder / "metrics.jsonl").stat().st_size
        command.limit_file_size(written + 100_000)
        assert command.wait() == 1, command.said()
        command.leaves_nothing()
        assert re.search(r"disk that holds .* is full", command.said())
        assert f"murmurate resume {command.folder}" in command.said()
        assert "Traceback" not in command.said()
        assert checkpoint.damage(checkpoint.newest(command.folder / "checkpoints")) is None


def test_the_error_of_a_loss_that_is_not_a_number_names_the_replica_and_the_update(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--replicas", 2, "--env-steps", 10**6, "--agent.learning-rate", 1e30)
    run = trained(tmp_path / "run", "cartpole-gala", *options, code=1)
    until(lambda: not any(map(psutil.pid_exists, run.pids().values())), "its roles to be gone")
    said = "".join(capfd.readouterr())
    assert re.search(r"replica [01]: the (loss|gradient|parameters) of .*'a2c' .* update \d+", said)
    assert run.summary()["exit"].startswith("failed: replica ")
    assert "Traceback" not in said
    assert not run.has_checkpoint(), "there was no good state to save"
