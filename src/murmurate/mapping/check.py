"""Measures the throughput of a run."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from murmurate.errors import RunFailed
from murmurate.launch.local import Local
from murmurate.mapping.pilot import steady
from murmurate.mapping.quiet import started
from murmurate.training.run import Run

_START_SECONDS = 6.0  # for the processes to start, and for their first episodes
_WARM_UP_SHARE = 0.3  # relative to the measured seconds
_RECORD_SECONDS = 0.5


def measured(run: Run, seconds: float = 12.0) -> float:
    """Env steps per second of all replicas of ``run`` together, once they learn, over about ``seconds``.

    Starts a real run with the local launcher, without evaluation. Raises RunFailed if the run fails, or is
    too slow to measure in that time.
    """
    run = dataclasses.replace(
        steady(run),
        launcher=Local.name,
        minutes=(_START_SECONDS + (1 + _WARM_UP_SHARE) * seconds) / 60,
        record_every_seconds=_RECORD_SECONDS,
    )
    with tempfile.TemporaryDirectory(prefix="murmurate-check-") as folder:
        started(run, Path(folder))
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return throughput(lines, run.replicas)


def throughput(lines: Sequence[dict[str, Any]], replicas: int) -> float:
    """The sum of the replicas' env steps per second, each measured from the replica's records after it began
    to learn and warmed up. Raises RunFailed if there are too few records, or no env steps between them."""
    records: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for line in lines:
        if line.get("kind", "replica") == "replica" and line.get("updates", 0) > 0:
            records[int(line.get("replica", 0))].append((float(line["time_seconds"]), int(line["env_steps"])))
    total = 0.0
    for rank in range(replicas):
        own = records[rank][:-1]  # the last record is made at the end, after waiting for the others
        own = own[int(_WARM_UP_SHARE / (1 + _WARM_UP_SHARE) * len(own)) :]
        if len(own) < 3 or own[0][1] == own[-1][1]:
            raise RunFailed("the run was too slow to measure in so few seconds")
        (began, first), (ended, last) = own[0], own[-1]
        total += (last - first) / (ended - began)
    return total
