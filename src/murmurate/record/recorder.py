"""The canonical record of a run: one JSON object in each line, written by several processes to one file.

Every line is a single ``write`` on a descriptor opened for appending, so that lines of different processes do
not mix. Console, TensorBoard and report are made from these lines. ``docs/metrics.md`` documents each field.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from murmurate.errors import DISK_FULL, RunFailed, cause_of

# Every line starts with this. A process killed during a write leaves an incomplete line, and the next
# writer's line follows it directly; the reader finds that line by its start, which no JSON string can
# contain.
LINE_START = b'{"time_seconds":'

# what every record has, what tells kinds of records apart, and what only some records of a run have
_KEYS = frozenset(
    (
        "time_seconds", "env_steps", "updates", "replica", "not_finite", "kind", "event", "message", "member",
        "env_steps_per_second", "success_rate", "simulator_restarts", "skipped_images", "decoder_deaths",
        "staleness_counts", "spans", "gossip_window", "disagreement", "distance_to_mean", "update_norm",
        "gradient_cosine", "perplexity", "validation_loss", "loss",
    )
)  # fmt: skip


class Recorder:
    """Appends the records of one process to a run's ``metrics.jsonl``.

    ``started_at`` is ``time.monotonic()`` in the launcher when the run began (all processes of a host share
    that clock); ``offset_seconds`` is the ``time_seconds`` of the checkpoint from which a run is resumed.
    ``replica`` is None for the launcher and for a centre.

    Raises ``RunFailed`` when the file cannot be opened, or a record cannot be written.
    """

    def __init__(
        self,
        path: Path | str,
        replica: int | None,
        started_at: float,
        *,
        offset_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self.replica = replica
        self._started_at = started_at - offset_seconds
        self._clock = clock
        self._latest: dict[str, Any] = {"env_steps": 0, "updates": 0}
        self._taken = set(_KEYS)
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o644)
        except OSError as error:
            raise _failure(self.path, error) from error

    @property
    def seconds(self) -> float:
        """Seconds since the run began, including those before a resume."""
        return self._clock() - self._started_at

    def restore(self, env_steps: int, updates: int) -> None:
        """Set the counts of events that come before the first record after a resume."""
        self._latest = {"env_steps": env_steps, "updates": updates}

    def record(self, metrics: Mapping[str, Any], of_strategy: Mapping[str, Any] | None = None) -> None:
        """Append one record of ``metrics`` and the strategy's own figures. One of these whose name another
        field of the run's records has is called ``strategy_NAME``.

        Values are numbers, strings, None, tensors or arrays of any shape, or lists and dicts of these. A
        value that is not finite is written as null, with its key under ``not_finite``. ``env_steps`` and
        ``updates`` default to those of the previous record. Raises ``RunFailed`` when the line cannot be
        written, TypeError for another value, and ValueError after ``close``.
        """
        if self._descriptor < 0:
            raise ValueError(f"the recorder of {self.path} is closed")
        for key in ("env_steps", "updates"):
            if metrics.get(key) is not None:
                self._latest[key] = int(metrics[key])
        self._taken.update(metrics)
        own = {self._own_name(name): figure for name, figure in (of_strategy or {}).items()}
        fields = {"time_seconds": 0.0, **own, **metrics, **self._latest, "replica": self.replica}
        line = _encoded(fields | {"time_seconds": round(self.seconds, 6)})
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise _failure(self.path, error) from error
        if written != len(line):
            raise _failure(self.path, OSError(errno.ENOSPC, "a record was written only in part"))

    def _own_name(self, name: str) -> str:
        return f"strategy_{name}" if name in self._taken or name.startswith("figure_") else name

    def event(self, event: str, message: str, **fields: Any) -> None:
        """Append an event: a short name (``docs/metrics.md`` lists them) and a sentence for the user."""
        self.record({"kind": "event", "event": event, "message": message, **fields})

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _encoded(fields: Mapping[str, Any]) -> bytes:
    """One record as a line of JSON."""
    not_finite: list[str] = []
    line: dict[str, Any] = {}
    for key, value in fields.items():
        line[key], finite = plain_json(value)
        if not finite:
            not_finite.append(key)
    if not_finite:
        line["not_finite"] = not_finite
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def plain_json(value: Any) -> tuple[Any, bool]:
    """``value`` as JSON types, and whether all of it was finite."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().tolist()
    elif isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None, False
    if isinstance(value, (list, tuple)):
        elements = [plain_json(element) for element in value]
        return [plain for plain, _ in elements], all(finite for _, finite in elements)
    if isinstance(value, Mapping):
        fields = {str(key): plain_json(field) for key, field in value.items()}
        return {key: plain for key, (plain, _) in fields.items()}, all(f for _, f in fields.values())
    return value, True


def _failure(path: Path, error: OSError) -> RunFailed:
    if error.errno in DISK_FULL:
        return RunFailed(
            f"The disk that holds {path} is full: free some space (or raise the quota or file-size limit)."
        )
    return RunFailed(f"Cannot write {path}: {cause_of(error)}. Make the folder writable.")
