"""The folder of a sweep: the runs of one recipe with several seeds, and ``sweep.json``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from murmurate.errors import Refusal
from murmurate.record.reader import parse_line
from murmurate.record.stored import UNSOUND, read_object

FILE = "sweep.json"


def run_folders(folders: Sequence[Path]) -> list[Path]:
    """``folders``, where the folders of its runs replace that of a sweep, in the order of their seeds.

    Raises Refusal for the folder of a sweep whose runs have recorded nothing.
    """
    expanded: list[Path] = []
    for folder in folders:
        if not (folder / FILE).is_file():
            expanded.append(folder)
            continue
        runs = [path for path in seed_folders(folder).values() if _has_records(path / "metrics.jsonl")]
        if not runs:
            raise Refusal(
                f"The sweep in {folder} has no run with records. Give the command that began it again."
            )
        expanded += runs
    return expanded


def distinct(folders: Sequence[Path]) -> list[Path]:
    """``folders`` without those that lead to the same place as one before them."""
    first: dict[str, Path] = {}
    for folder in folders:
        first.setdefault(os.path.realpath(folder), folder)
    return list(first.values())


def _has_records(path: Path) -> bool:
    """Whether a replica has written a record; a run that is starting, or failed at once, has only events."""
    try:
        with path.open("rb") as lines:
            return any((record := parse_line(line)) is not None and "kind" not in record for line in lines)
    except FileNotFoundError:
        return False


def seed_folders(folder: Path) -> dict[int, Path]:
    """The folder of each seed's run, which need not exist. Raises Refusal if ``sweep.json`` is damaged."""
    try:
        seeds = [int(seed) for seed in read_object(folder / FILE)["seeds"]]
    except (OSError, *UNSOUND) as error:
        raise Refusal(
            f"{folder / FILE} cannot be read ({error}). Name the runs' own folders: {folder}/seed-*"
        ) from error
    return {seed: folder / f"seed-{seed}" for seed in sorted(seeds)}
