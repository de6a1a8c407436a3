"""``Cluster``: the simulated cluster's step times, network and faults."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from murmurate.errors import Refusal, cause_of
from murmurate.fabric.simulated.latency import Compute, Network, compute_model
from murmurate.ranges import NonNegativeFloat, PositiveSeconds, Range, check_ranges
from murmurate.recipes import stored
from murmurate.record.reader import read_metrics

# keys of --network, and the field of Network that each sets
_NETWORK = {
    "latency": "latency_seconds",
    "bandwidth": "bandwidth",
    "spread": "spread",
    "handling": "handling_seconds",
    "handling-bandwidth": "handling_bandwidth",
    "resend": "resend_seconds",
    "collective": "collective",
    "ports": "ports",
    "trace": "trace_seconds",
}


# a shorter mean time would mean more faults per second than can be simulated
FaultSeconds = Annotated[float, Range(1e-3, 1e9)]


@dataclass(frozen=True)
class Cluster:
    """All seconds are virtual; every replica has a processor of its own.

    compute: the time of a step (batch, gradient, update): ``constant:0.01``; ``lognormal:0.01,0.5`` (median,
        spread of its logarithm); ``straggler:0.01,4`` (replica 0 takes 4 times as long;
        ``straggler:0.01,4,8``: the first eight do); ``sleeper:0.01,3`` (replica 0 sleeps 3 of its step times
        after each step; also with a number of replicas); ``trace:FILE`` (numbers, or a run folder).
    network: ``latency=`` seconds, ``bandwidth=`` bytes a second of each port, ``spread=`` of the logarithm of
        a message's time, ``trace=FILE`` of measured latencies in seconds, ``handling=`` seconds that a core
        needs for each message and ``handling-bandwidth=`` bytes a second that it handles, ``resend=`` seconds
        after which a lost message is sent again, ``collective=`` ring, tree or fastest, ``ports=no`` for
        ports that carry any number of messages at once.
    loss: share of messages that are lost.
    crash_every_seconds: mean time between crashes, each of a replica drawn from the living.
    restart_after_seconds: how long a crashed replica stays away; none: for ever.
    pause_every_seconds: mean time between pauses of a replica drawn from the living.
    pause_seconds: how long a pause lasts.
    cut_every_seconds: mean time between cuts of all links of one replica.
    cut_seconds: how long a cut lasts.
    partition: start, end, share: in between, that share of the replicas, those of the lowest ranks, and the
        rest receive nothing from each other.
    late_join: share, seconds: that share of the replicas joins only at that time.
    lines: records to write over the run; with more than 16 replicas each record combines all of them.
    """

    compute: str = "constant:0.01"
    network: str = "latency=1e-4,bandwidth=1e9"
    loss: Annotated[float, Range(0, 1, exclude_most=True)] = 0.0
    crash_every_seconds: FaultSeconds | None = None
    restart_after_seconds: PositiveSeconds | None = None
    pause_every_seconds: FaultSeconds | None = None
    pause_seconds: PositiveSeconds = 10.0
    cut_every_seconds: FaultSeconds | None = None
    cut_seconds: PositiveSeconds = 10.0
    partition: tuple[NonNegativeFloat, ...] = ()
    late_join: tuple[NonNegativeFloat, ...] = ()
    lines: Annotated[int, Range(1, 1_000_000)] = 100

    def validate(self) -> None:
        """Raise Refusal for invalid values."""
        self.compute_model()
        self.network_model()
        check_ranges(self)
        if self.partition and not (
            len(self.partition) == 3
            and 0 <= self.partition[0] < self.partition[1]
            and 0 < self.partition[2] < 1
        ):
            raise Refusal(
                f"partition is {self.partition}; it is a start, an end and a share. Use --partition 2,5,0.5."
            )
        if self.late_join and not (
            len(self.late_join) == 2 and 0 < self.late_join[0] < 1 and self.late_join[1] > 0
        ):
            raise Refusal(f"late_join is {self.late_join}; it is a share and seconds. Use --late-join 0.1,3.")

    def compute_model(self) -> Compute:
        """The model of ``compute``. Raises Refusal for an unknown model, invalid numbers, and a trace that
        cannot be read."""
        name, _, rest = self.compute.partition(":")
        try:
            given = rest.split(",") if rest else ()
            numbers = _read_trace(Path(rest)) if name == "trace" else tuple(map(_number, given))
            return compute_model(name, numbers)
        except ValueError as error:
            raise Refusal(
                f"--compute {self.compute}: {error}. For example --compute constant:0.01."
            ) from error

    def network_model(self) -> Network:
        """The model of ``network``. Raises Refusal for an unknown key, and for an invalid value."""
        fields: dict[str, Any] = {"loss": self.loss}
        try:
            for pair in filter(None, self.network.split(",")):
                key, _, value = pair.partition("=")
                if key not in _NETWORK:
                    raise ValueError(f"there is no '{key}': use {', '.join(_NETWORK)}")
                fields[_NETWORK[key]] = _network_value(key, value)
            return Network(**fields)
        except ValueError as error:
            raise Refusal(
                f"--network {self.network}: {error}. For example --network latency=1e-4,bandwidth=1e9."
            ) from error

    def late_ranks(self, replicas: int) -> list[int]:
        """The ranks that join late: the last ones, never all."""
        share = self.late_join[0] if self.late_join else 0.0
        count = min(math.ceil(share * replicas), replicas - 1)
        return list(range(replicas - count, replicas))


def _network_value(key: str, value: str) -> object:
    if key == "collective":
        return value
    if key == "trace":
        return _read_trace(Path(value))
    if key == "ports":
        if value not in ("yes", "no"):
            raise ValueError(f"ports is yes or no, not '{value}'")
        return value == "yes"
    return _number(value)


def _number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is no number") from None


def _read_trace(path: Path) -> tuple[float, ...]:
    """Seconds: from a file of numbers (a JSON list, or separated by spaces), or of the steps of a run folder.

    A step, from a batch to the next, takes the time between two records of a replica, without its waiting,
    divided by its batches between them. Raises ValueError if ``path`` has no such numbers, Refusal for a
    folder whose run cannot be read.
    """
    try:
        if path.is_dir():
            return _step_seconds(path)
        text = path.read_text()
        items = json.loads(text) if text.lstrip().startswith("[") else text.split()
        if not items:
            raise ValueError(f"{path} holds no numbers")
        return tuple(map(_number, items))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({cause_of(error)})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} holds no numbers") from error


def _step_seconds(folder: Path) -> tuple[float, ...]:
    updates_per_batch = stored(folder).learner.updates(1)
    last_record: dict[int, tuple[float, int]] = {}
    seconds: dict[int, list[float]] = defaultdict(list)
    for record in read_metrics(folder / "metrics.jsonl"):
        if record.get("replica") is None or record.get("waiting_seconds") is None:
            continue  # an event, or a centre's record
        rank, updates = int(record["replica"]), int(record["updates"])
        busy_seconds = float(record["time_seconds"]) - float(record["waiting_seconds"])
        if rank in last_record and updates > last_record[rank][1]:
            batches = (updates - last_record[rank][1]) / updates_per_batch
            seconds[rank].append((busy_seconds - last_record[rank][0]) / batches)
        last_record[rank] = busy_seconds, updates
    steps = tuple(s for _, durations in sorted(seconds.items()) for s in durations if s > 0)
    if not steps:
        raise ValueError(f"{folder} has too few records to derive the time of a step")
    return steps
