"""How much more memory this process may take: by the host, its control groups and its resource limits."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import psutil

from murmurate.errors import Refusal
from murmurate.native.control_groups import groups_of

FEWER_OR_SMALLER = "fewer replicas or a smaller network"  # the usual remedy
PROCESS_BYTES = 150 * 2**20  # private memory of a process that has imported torch
# names of the files with the limit and the usage, by the version of cgroups
_FILES = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
# entries of memory.stat that count memory which the kernel can free at once
_RECLAIMABLE = ("inactive_file ", "total_inactive_file ")


def available_bytes() -> int:
    """The memory that all processes of this run together may still take: the least that the host and each of
    this process's control groups allow."""
    return min(int(psutil.virtual_memory().available), *_left_in_groups(), 2**63)


def address_space_bytes() -> int:
    """The address space (``ulimit -v``) left to a process that has mapped as much as this one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return 2**63 if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)


def refuse_if_small(
    needed_bytes: int,
    what: str,
    each_bytes: int = 0,
    remedy: str = FEWER_OR_SMALLER,
) -> None:
    """Raise Refusal unless ``needed_bytes`` of memory are available for all processes together, and
    ``each_bytes`` of address space for one process.

    what: what needs this memory. remedy: what the user should use instead."""
    left, kind = available_bytes(), "memory"
    if needed_bytes <= left:
        needed_bytes, left, kind = each_bytes, address_space_bytes(), "address space (ulimit -v)"
    if needed_bytes > left:
        raise Refusal(
            f"{what} needs {memory_text(needed_bytes)} of {kind} and {memory_text(left)} are free. Use "
            f"{remedy}, or give the run more {kind}."
        )


def memory_text(count: int) -> str:
    """So many bytes in MiB, or in GiB from 100 GiB on."""
    if count >= 2**60:
        return f"{Decimal(count):.0e} bytes"
    return f"{count // 2**20:,} MiB" if count < 100 * 2**30 else f"{count // 2**30:,} GiB"


def _left_in_groups() -> Iterator[int]:
    """The memory that each of this process's control groups still allows."""
    for group, version in groups_of("memory"):
        if (left := _left(group, *_FILES[version])) is not None:
            yield left


def _left(group: Path, limit_file: str, usage_file: str) -> int | None:
    """The memory that the group still allows; None if it has no limit, or is not visible from here."""
    try:
        limit, usage = int((group / limit_file).read_text()), int((group / usage_file).read_text())
        stat = (group / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # the limit is "max", for example: there is none
        return None
    reclaimable = max((int(line.split()[1]) for line in stat if line.startswith(_RECLAIMABLE)), default=0)
    return max(0, limit - usage + reclaimable)
