"""Copies what a report needs of a run folder, thinned: ``python benchmarks/thin_run.py RUN_DIR OUT_DIR``.

Of each replica's records 50 to 100 are kept (all, if there are fewer), without the returns of single episodes
and without histograms; of the other lines of metrics.jsonl, all but checkpoints. Commands are written without
--out, and with the name alone of a folder that is resumed.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import defaultdict
from pathlib import Path

from murmurate.record import stored
from murmurate.record.reader import Record, read_metrics

_RECORDS = 50  # of each replica, at least
_LEFT_OUT = ("episode_returns", "staleness_counts")


def main(source: Path, target: Path) -> None:
    objects = {name: stored.read_object(source / name) for name in ("run.json", "summary.json")}
    lines = _thinned(read_metrics(source / "metrics.jsonl"))
    target.mkdir(parents=True)
    for name, value in objects.items():
        if isinstance(command := value.get("command"), list):
            value["command"] = _without_folder(command)
        elif isinstance(
            command, str
        ):  # of a run that was resumed with other settings: a command in each line
            lines_of_words = [shlex.split(line) for line in command.splitlines()]
            value["command"] = "\n".join(shlex.join(_without_folder(words)) for words in lines_of_words)
        (target / name).write_text(json.dumps(stored.seal(value, name), indent=1) + "\n")
    (target / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _thinned(lines: list[Record]) -> list[Record]:
    records: dict[int, list[Record]] = defaultdict(list)
    others = []
    for line in lines:
        if "kind" not in line:
            records[line["replica"]].append({k: v for k, v in line.items() if k not in _LEFT_OUT})
        elif line.get("event") != "checkpoint":
            others.append(line)
    for replica, every in records.items():
        step = max(1, len(every) // _RECORDS)
        records[replica] = every[: len(every) - 1 : step] + every[-1:]
    kept = [*others, *(record for every in records.values() for record in every)]
    return sorted(kept, key=lambda line: line["time_seconds"])


def _without_folder(command: list[str]) -> list[str]:
    """``command`` without --out and its value; of the folder that it resumes only the name."""
    kept: list[str] = []
    words = iter(command)
    for word in words:
        if word == "--out":
            next(words, None)  # its value
        elif not word.startswith("--out="):
            kept.append(Path(word).name if kept[-1:] == ["resume"] else word)
    return kept


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python benchmarks/thin_run.py RUN_DIR OUT_DIR")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
