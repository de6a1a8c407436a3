"""The control groups of this process (Linux), by which containers limit memory and cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def groups_of(controller: str) -> Iterator[tuple[Path, int]]:
    """(folder, version of cgroups) of each group that limits this process by ``controller``, ``memory`` or
    ``cpu``, from its own one up. Those that are not visible from here are among them."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, version = (GROUPS / controller, 1) if controllers else (GROUPS, 2)
        group = root / path.lstrip("/")
        while group.is_relative_to(GROUPS):
            yield group, version
            group = group.parent
