"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from murmurate.native import control_groups
from murmurate.native.cores import usable_cores


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/outer/inner", {"inner/cpu.max": "max 100000", "cpu.max": "250000 100000"}, 3),
        ("0::/outer/inner", {"inner/cpu.max": "50000 100000"}, 1),
        ("0::/outer/inner", {"inner/cpu.max": "max 100000"}, 16),
        ("4:cpu,cpuacct:/outer", {"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"}, 4),
        ("4:cpu,cpuacct:/outer", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 16),
        ("4:cpuset:/outer", {"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"}, 16),
        ("0::/outer", {"cpu.max": "3200000 100000"}, 16),
    ],
)
def test_a_container_may_use_the_cores_of_its_quota(
    line: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tightest of the groups counts, rounded up."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    group = (tmp_path if line.startswith("0") else tmp_path / "cpu") / "outer"
    (group / "inner").mkdir(parents=True)
    for name, text in files.items():
        (group / name).write_text(f"{text}\n")
    listed = tmp_path / "cgroup"
    listed.write_text(f"3:pids:/other\n{line}\n")
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "OWN_GROUPS", listed)
    assert usable_cores() == cores
    listed.unlink()
    assert usable_cores() == 16
