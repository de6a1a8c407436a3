"""TensorBoard events from a run's records: a writer for each replica and one for all other records. The step
is the env steps of all replicas."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter  # type: ignore[import-untyped]
from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboardX.summary import text  # type: ignore[import-untyped]

GROUPS = {
    "return": ("return_mean", "success_rate", "episode_return", "episode_length"),
    "speed": ("env_steps_per_second", "waiting_seconds"),
    "learning": (
        "loss",
        "policy_loss",
        "value_loss",
        "entropy",
        "gradient_norm",
        "learning_rate",
        "kl",
        "explained_variance",
        "td_error",
        "q_mean",
        "temperature",
    ),
    "agreement": (
        "staleness",
        "staleness_max",
        "heard",
        "rounds",
        "disagreement",
        "distance_to_mean",
        "update_norm",
        "gradient_cosine",
        "bytes_exchanged",
    ),
}
_GROUP_OF = {key: group for group, keys in GROUPS.items() for key in keys}
_NOT_SCALARS = frozenset(
    {
        "time_seconds",
        "env_steps",
        "total_env_steps",
        "replica",
        "member",
        "kind",
        "event",
        "not_finite",
        "seed",
    }
)


class TensorBoard:
    """Writes ``<folder>/replica-<i>/events.out.tfevents.*``, and ``<folder>/launcher/...`` for records of no
    replica: the launcher's events, a centre's records, and evaluations.

    Event files of an earlier start of the same run are removed: ``metrics.jsonl`` is canonical and its
    ``Tail`` begins with the whole history, so no point after the checkpoint survives a resume.
    ``started_at_unix`` is the wall time of ``time_seconds`` 0, in seconds since 1970.

    tensorboardX's ``SummaryWriter`` is not used, because it hangs when the disk is full: its writing thread
    dies and the queue blocks. Here ``feed`` and ``close`` raise OSError.
    """

    def __init__(self, folder: Path | str, started_at_unix: float) -> None:
        self.folder = Path(folder)
        self._started_at_unix = started_at_unix
        self._writers: dict[str, EventsWriter] = {}
        for old in (*self.folder.glob("replica-*"), self.folder / "launcher"):
            shutil.rmtree(old, ignore_errors=True)

    def feed(self, records: Iterable[Mapping[str, Any]]) -> None:
        written = set()
        for record in records:
            replica = record.get("replica")
            writer = self._writer("launcher" if replica is None else f"replica-{replica}")
            wall = self._started_at_unix + float(record["time_seconds"])
            if record.get("kind") == "event":
                summary = text("events", str(record.get("message", record.get("event"))))
            else:
                pairs = _evaluation(record) if record.get("kind") == "evaluation" else scalars(record)
                values = [Summary.Value(tag=tag, simple_value=value) for tag, value in pairs]
                summary = Summary(value=values)
            writer.write_event(Event(wall_time=wall, step=step_of(record), summary=summary))
            written.add(writer)
        for writer in written:  # no others, as each flush waits for the disk
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, name: str) -> EventsWriter:
        if name not in self._writers:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            self._writers[name] = EventsWriter(str(self.folder / name / "events"))
        return self._writers[name]


def step_of(record: Mapping[str, Any]) -> int:
    """The env steps of all replicas together, if the record has them: with a replica's own as the step, four
    replicas would seem to learn from a quarter of the env steps, and evaluations would be elsewhere."""
    return int(record.get("total_env_steps") or record.get("env_steps") or 0)


def scalars(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(tag, value) of all numbers of one record.

    Tags are ``<group>/<field>``, for an entry of a list ``<group>/<field>/<index>``; finished episodes become
    the means of their returns and lengths. A value that was not finite is NaN, which TensorBoard marks; null
    entries of a list, and returns that were not finite, are left out.
    """
    values: list[tuple[str, float]] = []
    for key, value in record.items():
        if key in _NOT_SCALARS:
            continue
        if key == "episode_returns":
            returns, lengths = zip(*value, strict=True) if value else ((), ())
            for name, numbers in (("episode_return", returns), ("episode_length", lengths)):
                finite = [number for number in numbers if number is not None]
                if finite:
                    values.append((_tag(name), sum(finite) / len(finite)))
        elif isinstance(value, (int, float)):
            values.append((_tag(key), float(value)))
        elif isinstance(value, list):
            entries = enumerate(value)
            values += [(f"{_tag(key)}/{i}", float(v)) for i, v in entries if isinstance(v, (int, float))]
    values += [(_tag(k), math.nan) for k in record.get("not_finite", ()) if record.get(k) is None]
    return values


def _evaluation(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(tag, value) of the figures of an evaluation while the run learns: ``evaluation/<figure>``."""
    return [
        (f"evaluation/{key}", float(value))
        for key, value in record.items()
        if key not in _NOT_SCALARS and key != "updates" and isinstance(value, (int, float))
    ]


def _tag(key: str) -> str:
    group = "figures" if key.startswith("figure_") else _GROUP_OF.get(key, "other")
    return f"{group}/{key}"
