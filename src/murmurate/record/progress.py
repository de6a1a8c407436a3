"""The progress of a run, from its records alone, for the console."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# time over which the rate for an ETA is measured: short enough to notice a death, long enough not to flicker
RATE_WINDOW_SECONDS = 60.0
HISTORY_POINTS = 4096  # most points of ``Progress.returns``


@dataclass
class ReplicaProgress:
    """The newest known value of every field of one replica."""

    replica: int
    latest: dict[str, Any] = field(default_factory=dict)
    dead: bool = False
    finished: bool = False
    silent: bool = False  # the launcher has reported that no heartbeat arrives
    death: str = ""  # the newest message about its death, since it was last started

    def number(self, key: str) -> float | None:
        """The newest value of ``key``; NaN if it was not finite, None if there is none.

        None for the speed of a dead replica, too.
        """
        value = self.latest.get(key)
        if self.dead and key == "env_steps_per_second":
            return None
        return float(value) if isinstance(value, (int, float)) else None

    def state(self, now_seconds: float, silent_after_seconds: float) -> str:
        """One of "starting", "running", "silent 20s" (say), "finished" and "dead"."""
        if self.dead:
            return "dead"
        if self.finished:
            return "finished"
        if not self.latest:
            return "starting"
        silent = now_seconds - float(self.latest["time_seconds"])  # seconds
        return f"silent {silent:.0f}s" if self.silent or silent > silent_after_seconds else "running"


class Progress:
    """Totals over the records of all replicas.

    events: events and evaluations, in the order fed. returns: ``return_mean`` after each record that had one,
    evenly thinned to at most ``HISTORY_POINTS``. seconds: the latest ``time_seconds``.
    """

    def __init__(self, replicas: int) -> None:
        self.replicas = [ReplicaProgress(index) for index in range(replicas)]
        self.events: list[dict[str, Any]] = []
        self.returns: list[float] = []
        self._returns_seen, self._returns_stride = 0, 1
        self.seconds = 0.0
        self.counted = 0  # env steps of all replicas, as far as the run itself has counted them
        self._episodes: deque[float] = deque(maxlen=100)
        self._totals: deque[tuple[float, int]] = deque([(0.0, 0)])  # (seconds, env steps)

    def feed(self, records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Add records; return the new events and evaluations among them. A death reported by several members
        counts once."""
        new: list[dict[str, Any]] = []
        for record in records:
            self.seconds = max(self.seconds, float(record["time_seconds"]))
            if record.get("kind") == "evaluation":
                new.append(dict(record))
                continue
            if record.get("kind") == "event":
                if self._event(record):
                    new.append(dict(record))
                continue
            index = record.get("replica")
            if isinstance(index, int) and 0 <= index < len(self.replicas):
                self._replica_record(self.replicas[index], record)
        self.events.extend(new)
        return new

    def _event(self, record: Mapping[str, Any]) -> bool:
        """Apply an event to its replica; return whether it is new."""
        name, member = record.get("event"), record.get("member", record.get("replica"))
        if name in ("silent", "woke", "died") and isinstance(member, int) and member < len(self.replicas):
            self.replicas[member].silent = name == "silent"
        lifecycle_events = ("died", "finished", "restarted", "joined")
        if name in lifecycle_events and isinstance(member, int) and member < len(self.replicas):
            replica = self.replicas[member]
            message = str(record.get("message")) if name == "died" else ""
            if message and message == replica.death:
                return False
            replica.death = message
            replica.dead = name == "died" or (replica.dead and name != "joined")
            replica.finished = name == "finished"
        if name == "resumed":
            self._totals = deque([(self.seconds, self.env_steps)])
            for replica in self.replicas:
                replica.dead, replica.finished, replica.death = False, False, ""
                replica.silent = False  # of the process before the resume
        return True

    def _replica_record(self, replica: ReplicaProgress, record: Mapping[str, Any]) -> None:
        replica.latest.update({key: value for key, value in record.items() if value is not None})
        self._episodes.extend(pair[0] for pair in record.get("episode_returns") or () if pair[0] is not None)
        for key in record.get("not_finite") or ():
            replica.latest[key] = math.nan
        if self._totals and self._totals[-1][0] == self.seconds:
            self._totals.pop()
        self._totals.append((self.seconds, self.env_steps))
        while len(self._totals) > 2 and self.seconds - self._totals[0][0] > RATE_WINDOW_SECONDS:
            self._totals.popleft()
        if record.get("return_mean") is not None and self.return_mean is not None:
            self._returns_seen += 1
            if self._returns_seen % self._returns_stride == 0:
                self.returns.append(self.return_mean)
            # thinning old points and skipping new ones keeps them evenly spaced
            if len(self.returns) > HISTORY_POINTS:
                self.returns = self.returns[1::2]
                self._returns_stride *= 2

    @property
    def env_steps(self) -> int:
        """Total over replicas, dead ones included."""
        recorded = sum(int(replica.latest.get("env_steps", 0)) for replica in self.replicas)
        return max(recorded, self.counted)

    @property
    def updates(self) -> int:
        """The largest number over the replicas."""
        return max((int(replica.latest.get("updates", 0)) for replica in self.replicas), default=0)

    @property
    def living(self) -> list[ReplicaProgress]:
        return [replica for replica in self.replicas if not replica.dead]

    @property
    def env_steps_per_second(self) -> float | None:
        """Rate of all replicas together over the last minute; None before there is anything to measure."""
        if len(self._totals) < 2:
            return None
        (start, before), (end, after) = self._totals[0], self._totals[-1]
        return (after - before) / (end - start) if end > start else None

    @property
    def return_mean(self) -> float | None:
        """Mean of the last 100 episodes of all replicas together, as for ``stop_at_return``.

        While no episode is known: the mean of the living replicas' own means.
        """
        if self._episodes:
            return statistics.fmean(self._episodes)
        return self._over_living("return_mean", statistics.fmean)

    def number(self, key: str) -> float | None:
        """``key`` over all replicas: the property of that name (env_steps, updates, env_steps_per_second and
        return_mean); of staleness and disagreement the living replicas' maximum, of all else their mean. None
        if it is unknown."""
        if key in ("env_steps", "updates", "env_steps_per_second", "return_mean"):
            total: float | None = getattr(self, key)
            return total
        return self._over_living(key, max if key in ("staleness", "disagreement") else statistics.fmean)

    def best(self, metric: str, lower_is_better: bool) -> float | None:
        """The best of the living replicas' newest values of ``metric``."""
        return self._over_living(metric, min if lower_is_better else max)

    def eta_seconds(self, target_env_steps: int | None, target_seconds: float | None = None) -> float | None:
        """Seconds until the earlier of the two targets, at the rate of the last minute; None if unknown."""
        ends: list[float] = []
        rate = self.env_steps_per_second
        if target_env_steps is not None and rate:
            ends.append(max(0.0, (target_env_steps - self.env_steps) / rate))
        if target_seconds is not None:
            ends.append(max(0.0, target_seconds - self.seconds))
        return min(ends, default=None)

    def fraction(self, target_env_steps: int | None, target_seconds: float | None = None) -> float | None:
        """Share of the run that is done, by the target that is nearer; None without a target."""
        shares: list[float] = []
        if target_env_steps:
            shares.append(self.env_steps / target_env_steps)
        if target_seconds:
            shares.append(self.seconds / target_seconds)
        return min(1.0, max(shares)) if shares else None

    def _over_living(self, key: str, merge: Any) -> float | None:
        values = (r.number(key) for r in self.living)
        known = [value for value in values if value is not None and math.isfinite(value)]
        return float(merge(known)) if known else None
