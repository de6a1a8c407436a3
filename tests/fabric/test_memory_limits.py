"""What a host, a control group and a limit of the process leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from murmurate.errors import Refusal
from murmurate.fabric.processes import memory_limits
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.memory_limits import available_bytes, refuse_if_small
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.native import control_groups


def test_what_is_free_is_a_share_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < available_bytes() < 2**50
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: 2**30)
    refuse_if_small(2**30, "a run")
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: 2**30 - 1)
    with pytest.raises(Refusal, match="a run needs 1,024 MiB of memory and 1,023 MiB are free"):
        refuse_if_small(2**30, "a run")
    with pytest.raises(Refusal, match="a run needs 14,704 GiB of memory and 1,023 MiB are free"):
        refuse_if_small(14_704 * 2**30, "a run")
    with pytest.raises(Refusal, match=r"needs 1e\+300 bytes of memory"):
        refuse_if_small(10**300, "a run")


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("0::/outer/inner", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:cpu,memory:/outer/inner",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_the_tightest_of_the_control_groups_counts(
    line: str, names: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, used, reclaimable = names
    tree = tmp_path if line.startswith("0") else tmp_path / "memory"
    inner = tree / "outer" / "inner"
    inner.mkdir(parents=True)
    for group, most, now in ((inner, "max", 10), (inner.parent, str(2**20), 2**19)):
        (group / limit).write_text(f"{most}\n")
        (group / used).write_text(f"{now}\n")
        (group / "memory.stat").write_text(f"anon 5\n{reclaimable} 100\n")
    listed = tmp_path / "cgroup"
    listed.write_text(f"3:pids:/other\n{line}\n")
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "OWN_GROUPS", listed)
    assert available_bytes() == 2**20 - 2**19 + 100
    listed.unlink()
    assert available_bytes() > 2**20


_RUN = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30,) * 2)
from murmurate.cli.main import main
*sizes, folder = sys.argv[1:]
short = ["--updates", "1", "--eval-episodes", "1", "--launcher", "inline", "--out", folder]
def tried(hidden):
    code = main(["train", "cartpole-gala", "--agent.hidden", hidden, *short])
    # of this program alone: ru_maxrss begins with what the process that started it had
    peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return code, peak, int(os.path.exists(folder))
for outcome in [tried(hidden) for hidden in sizes]:
    print(*outcome)
"""


def _run(folder: Path, *sizes: str) -> tuple[list[tuple[int, ...]], str]:
    """(exit code, peak memory in KiB so far, whether the folder is there) of one process that tries networks
    of ``sizes`` in turn; and its stderr."""
    command = [sys.executable, "-c", _RUN, *sizes, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[-len(sizes) :]
    return [tuple(map(int, line.split())) for line in lines], done.stderr


@pytest.mark.parametrize(
    "sizes", [("9_000", "1e9"), pytest.param(("100_000", "9007199254740992"), marks=pytest.mark.slow)]
)
def test_a_network_that_cannot_fit_is_refused_before_any_of_it_is_made_and_an_ordinary_one_fits(
    sizes: tuple[str, ...], tmp_path: Path
) -> None:
    tried, errors = _run(tmp_path / "run", *sizes, "64")
    assert [(code, exists) for code, _, exists in tried] == [(2, 0)] * len(sizes) + [(0, 1)], errors
    assert "Traceback" not in errors
    assert errors.count("smaller network") == len(sizes)
    peaks_kib = [peak for _, peak, _ in tried]
    assert peaks_kib[len(sizes) - 1] < 2**20, "no more than the libraries take"


def test_more_members_than_a_register_can_number_are_refused() -> None:
    memory_file = SharedMemoryFile.create()
    with pytest.raises(Refusal, match="255 processes cannot share memory: at most 254"):
        ProcessFabric(memory_file, RunState(255), 0)
    memory_file.close()
