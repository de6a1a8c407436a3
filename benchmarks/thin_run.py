"""Copies what a report needs of a run folder, thinned: ``python benchmarks/thin_run.py RUN_DIR OUT_DIR``.

Of the records of metrics.jsonl about 50 of each replica are kept, without the returns of single episodes and
without histograms, and all events but checkpoints. The option --out is left out of the command.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from murmurate.record import stored

_RECORDS = 50  # of each replica
_LEFT_OUT = ("episode_returns", "staleness_counts")


def main(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for name in ("run.json", "summary.json"):
        value = stored.read_object(source / name)
        if "command" in value:
            value["command"] = _without_out(value["command"])
        (target / name).write_text(json.dumps(stored.seal(value, name), indent=1) + "\n")
    lines = map(json.loads, (source / "metrics.jsonl").read_text().splitlines())
    kept = "".join(json.dumps(line) + "\n" for line in _thinned(list(lines)))
    (target / "metrics.jsonl").write_text(kept)


def _thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    records: dict[int, list[dict[str, Any]]] = defaultdict(list)
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


def _without_out(command: list[str]) -> list[str]:
    if "--out" not in command:
        return command
    at = command.index("--out")
    return command[:at] + command[at + 2 :]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python benchmarks/thin_run.py RUN_DIR OUT_DIR")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
