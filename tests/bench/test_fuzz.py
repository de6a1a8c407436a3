"""Fuzzing notices what falls, and finds nothing that falls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from murmurate.bench import _fuzz_arguments, _fuzz_corpora, _fuzz_texts
from murmurate.bench._fuzz_process import attack, run_command
from murmurate.errors import Refusal, RunFailed


def _falls(case: str, folder: Path) -> str:
    """Ends as ``case`` says."""
    if case == "refused":
        raise Refusal("no")
    if case == "failed":
        raise RunFailed("not now")
    if case == "raised":
        raise ValueError("unforeseen")
    if case == "printed":
        print("Traceback (most recent call last):", file=sys.stderr)
    if case == "command":
        return run_command(["list", "nothing"])
    if case == "hung":
        signal.pause()
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "logged":
        (folder / "run" / "logs").mkdir(parents=True)
        (folder / "run" / "logs" / "0.log").write_text("Traceback (most recent call last):")
    if case == "forked":
        subprocess.Popen(["sleep", "600"])
    if case == "large":
        bytearray(200 << 20)
    (folder / "left" / "behind").mkdir(parents=True)
    return "accepted"


@pytest.mark.slow
def test_each_way_to_end_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    cases = [
        "refused",
        "failed",
        "raised",
        "printed",
        "command",
        "hung",
        "killed",
        "accepted",
        "logged",
        "forked",
    ]
    counts = attack(_falls, cases, deadline_seconds=10)
    peak_bytes = counts.pop("peak_bytes")
    once = dict.fromkeys(("accepted", "failed", "hangs", "deaths", "left"), 1)
    assert counts == {"attempts": 10, "refused": 2, "tracebacks": 3, "silent": 0, **once}
    assert "tracebacks" in capfd.readouterr().err, "what fell is shown"
    assert attack(_falls, ["large"], deadline_seconds=60)["peak_bytes"] > peak_bytes + (100 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("part", [_fuzz_arguments, _fuzz_corpora, _fuzz_texts])
def test_nothing_falls(part) -> None:  # type: ignore[no-untyped-def]
    counts = part.attack(40, 7)
    assert counts["attempts"] == 40
    assert not any(counts[name] for name in ("tracebacks", "hangs", "deaths", "silent", "left"))
    assert counts["peak_bytes"] < 1 << 30
