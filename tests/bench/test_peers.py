"""Peers of ``atari-throughput``: what is made of what they print, and of how they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from murmurate.bench import _peers

_FIGURES = '{"env_steps": 600, "cpu_seconds": 3.0}'


@pytest.mark.parametrize(
    ("script", "status", "rate"),
    [
        (f"echo loading; echo '{_FIGURES}'", "ran", 200.0),
        (f"echo '{_FIGURES}'; echo a game crashed >&2; exit 3", "failed: a game crashed", None),
        ("echo 600; echo no figures >&2", "failed: no figures", None),
        ("echo nothing to say >&2", "failed: nothing to say", None),
    ],
)
def test_only_a_peer_that_ends_well_has_a_rate(
    script: str, status: str, rate: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / _peers.PEERS[0] / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("MURMURATE_PEERS", str(tmp_path))
    entry, absent = _peers.entries(True, lambda line: None)
    assert (entry["status"], entry.get("env_steps_per_cpu_second")) == (status, rate)
    assert absent["status"].startswith("not installed")
