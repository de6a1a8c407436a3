"""Models of how long a member's steps and the network's messages take on a simulated cluster.

Every model is an immutable value; its random draws are from the generator that its methods are given. All
seconds are virtual.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

_DRAWN_AT_ONCE = 64  # random numbers
_LONGEST_SECONDS = 1e9  # the clock would not advance by short times after much longer ones
_GREATEST_SPREAD = 50.0  # exp(spread x N(0, 1)) is finite up to here


class Compute(Protocol):
    """A model of the duration of steps (a batch, a gradient, an update)."""

    def steps(self, rank: int, generator: np.random.Generator) -> Iterator[tuple[float, float]]:
        """An endless sequence with, for each step of ``rank``: (seconds busy, seconds asleep after it)."""
        ...


@dataclass(frozen=True)
class LogNormal:
    """Each step takes exp(log(median) + spread x N(0, 1)), drawn anew; with spread 0 always the median."""

    median_seconds: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check_step(self.median_seconds)
        _check_within("the spread", self.spread, 0.0, _GREATEST_SPREAD)

    def steps(self, rank: int, generator: np.random.Generator) -> Iterator[tuple[float, float]]:
        if not self.spread:
            yield from itertools.repeat((self.median_seconds, 0.0))
        while True:
            for z in generator.standard_normal(_DRAWN_AT_ONCE).tolist():
                yield self.median_seconds * math.exp(self.spread * z), 0.0


@dataclass(frozen=True)
class Straggler:
    """All steps take ``seconds``, but those of the lowest ``slow`` ranks ``times`` as long; or, with
    ``sleeps``, these ranks sleep after each step for ``times`` the step's duration."""

    seconds: float
    times: float
    slow: int = 1
    sleeps: bool = False

    def __post_init__(self) -> None:
        _check_step(self.seconds)
        least = 0.0 if self.sleeps else 1.0
        _check_within("how much slower the straggler is", self.times, least, _LONGEST_SECONDS / self.seconds)

    def steps(self, rank: int, generator: np.random.Generator) -> Iterator[tuple[float, float]]:
        busy, asleep = self.seconds, 0.0
        if rank < self.slow:
            busy, asleep = (busy, busy * self.times) if self.sleeps else (busy * self.times, 0.0)
        return itertools.repeat((busy, asleep))


@dataclass(frozen=True)
class Trace:
    """Measured ``seconds`` of successive steps, which each member repeats cyclically from a random start."""

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ValueError("a trace has at least one step's seconds")
        for seconds in self.seconds:
            _check_step(seconds)

    def steps(self, rank: int, generator: np.random.Generator) -> Iterator[tuple[float, float]]:
        start = int(generator.integers(len(self.seconds)))
        repeated = itertools.cycle(self.seconds[start:] + self.seconds[:start])
        return ((seconds, 0.0) for seconds in repeated)


@dataclass(frozen=True)
class Network:
    """The time that a message takes between two members, and a collective among many.

    A message takes (latency + bytes / bandwidth) x exp(spread x N(0, 1)); if ``trace_seconds`` is given, the
    latency is drawn from it. bandwidth: bytes per second, in each direction, of a member's port. ports:
    whether a port carries only one message of mail at a time in each direction, so that many senders to one
    member queue for its port. loss: probability that a message of a collective or a register is lost (for
    mail: ``MailFaults``); collectives send it again after ``resend_seconds``, a register's reader waits for
    the next version. handling_seconds: time that a CPU core needs for each message of mail or a register that
    it sends or receives, beside size / handling_bandwidth (bytes per second).

    collective: ``ring`` takes 2(n-1) steps with messages of 1/n of the bytes (Patarasuk and Yuan 2009);
    ``tree`` takes 2 ceil(log2 n) steps with messages of all bytes; ``fastest`` is the one of these that would
    take less time without spread or loss. Each step takes as long as the slowest of its n messages, plus
    the time for sending again the one that is lost most often.
    """

    latency_seconds: float = 0.0
    bandwidth: float = math.inf
    spread: float = 0.0
    trace_seconds: tuple[float, ...] = ()
    ports: bool = True
    loss: float = 0.0
    resend_seconds: float = 0.2
    handling_seconds: float = 0.0
    handling_bandwidth: float = math.inf
    collective: Literal["ring", "tree", "fastest"] = "fastest"

    def __post_init__(self) -> None:
        for name in ("latency_seconds", "handling_seconds", "resend_seconds"):
            _check_within(name, getattr(self, name), 0.0, _LONGEST_SECONDS)
        _check_within("spread", self.spread, 0.0, _GREATEST_SPREAD)
        _check_positive("the bandwidth", self.bandwidth)
        _check_positive("the bandwidth of handling", self.handling_bandwidth)
        for seconds in self.trace_seconds:
            _check_within("a measured latency", seconds, 0.0, _LONGEST_SECONDS)
        if not 0 <= self.loss < 1:
            raise ValueError(f"a loss of {self.loss} is not a share of the messages: give 0 to less than 1")
        if self.collective not in ("ring", "tree", "fastest"):
            raise ValueError(f"there is no collective '{self.collective}': use ring, tree or fastest")

    @property
    def constant(self) -> bool:
        """Whether messages of one size all take the same time, and none is lost."""
        return not (self.spread or self.loss or self.trace_seconds)

    def transfer_seconds(self, size_bytes: float) -> float:
        """How long a message of that size occupies a port."""
        return size_bytes / self.bandwidth

    def work_seconds(self, size_bytes: float) -> float:
        """How long a message of that size occupies a CPU core of its sender, and of its receiver."""
        return self.handling_seconds + size_bytes / self.handling_bandwidth

    def delays(self, count: int, size_bytes: float, generator: np.random.Generator) -> NDArray[np.float64]:
        """The time that each of ``count`` messages takes if it is not lost, [count]."""
        if not self.spread and not self.trace_seconds:
            return np.full(count, self.latency_seconds + self.transfer_seconds(size_bytes))
        if self.spread and self.trace_seconds:
            return self._draws((count,), size_bytes, generator)
        return self._quantiles(generator.random(count), size_bytes)

    def _draws(
        self, shape: tuple[int, ...], size_bytes: float, generator: np.random.Generator
    ) -> NDArray[np.float64]:
        """Times of messages, in seconds, with ``trace_seconds`` and a spread. They are drawn one by one, as
        their quantiles have no closed form."""
        latency = generator.choice(self.trace_seconds, shape)
        factor = np.exp(self.spread * generator.standard_normal(shape))
        drawn: NDArray[np.float64] = (latency + self.transfer_seconds(size_bytes)) * factor
        return drawn

    def _quantiles(self, u: NDArray[np.float64], size_bytes: float) -> NDArray[np.float64]:
        """The quantiles ``u`` of the time that a message takes, in seconds; not for ``trace_seconds`` with a
        spread."""
        transfer = self.transfer_seconds(size_bytes)
        latency: NDArray[np.float64] | float = self.latency_seconds
        if self.trace_seconds:
            latency = np.quantile(self.trace_seconds, u, method="inverted_cdf")
        seconds = np.broadcast_to(latency + transfer, u.shape)
        if not self.spread:
            return np.array(seconds)
        return seconds * np.exp(self.spread * _normal_quantiles(u))

    def collective_seconds(self, size_bytes: int, members: int, generator: np.random.Generator) -> float:
        """The time from the last member's call to the result, which all members have at the same time."""
        if members < 2:
            return 0.0
        steps, message_bytes = self._steps(size_bytes, members)
        if self.constant:
            return steps * (self.latency_seconds + self.transfer_seconds(message_bytes))
        if self.spread and self.trace_seconds:
            slowest = self._draws((steps, members), message_bytes, generator).max(1)
        else:  # the maximum of n uniform numbers, distributed as u ** (1 / n), gives the slowest message
            slowest = self._quantiles(generator.random(steps) ** (1 / members), message_bytes)
        if self.loss:
            u = generator.random(steps) ** (1 / members)
            # how often the unluckiest message is lost: the quantile u of a geometric distribution
            times_lost = np.floor(np.log1p(-np.minimum(u, 1 - 1e-16)) / math.log(self.loss))
            slowest = slowest + times_lost * self.resend_seconds
        return float(slowest.sum())

    def collective_bytes(self, size_bytes: int, members: int) -> float:
        """The number of bytes that each member sends, and also receives, in a ring as (on average) in a
        tree."""
        return 2 * size_bytes * (members - 1) / members

    def _steps(self, size_bytes: int, members: int) -> tuple[int, float]:
        """(number of successive steps, bytes of each message)"""
        if self._is_ring(size_bytes, members):
            return 2 * (members - 1), size_bytes / members
        return 2 * math.ceil(math.log2(members)), float(size_bytes)

    def _is_ring(self, size_bytes: int, members: int) -> bool:
        if self.collective != "fastest":
            return self.collective == "ring"
        latency = float(np.mean(self.trace_seconds)) if self.trace_seconds else self.latency_seconds
        ring = 2 * (members - 1) * (latency + self.transfer_seconds(size_bytes / members))
        tree = 2 * math.ceil(math.log2(max(members, 2))) * (latency + self.transfer_seconds(size_bytes))
        return ring <= tree


def compute_model(name: str, numbers: Sequence[float]) -> Compute:
    """The model of that name, made from ``numbers``: ``constant`` (seconds), ``lognormal`` (median seconds,
    spread), ``straggler`` and ``sleeper`` (seconds, times, and how many ranks are slow; by default one),
    ``trace`` (the seconds of each step). Raises ValueError for another name, a wrong number of numbers, or
    numbers outside a model's range."""
    if name == "trace":
        return Trace(tuple(numbers))
    counts = {"constant": (1,), "lognormal": (2,), "straggler": (2, 3), "sleeper": (2, 3)}
    if name not in counts:
        raise ValueError(f"there is no model '{name}' of compute time: use {', '.join(counts)} or trace")
    if len(numbers) not in counts[name]:
        wanted = " or ".join(map(str, counts[name]))
        raise ValueError(f"{name} takes {wanted} number(s), not {len(numbers)}")
    if name == "constant":
        return LogNormal(numbers[0])
    if name == "lognormal":
        return LogNormal(numbers[0], numbers[1])
    slow = numbers[2] if len(numbers) == 3 else 1.0
    if not (slow >= 1 and slow.is_integer()):
        raise ValueError(f"the number of slow replicas must be a whole number of at least 1, not {slow:g}")
    return Straggler(numbers[0], numbers[1], int(slow), sleeps=name == "sleeper")


def _normal_quantiles(u: NDArray[np.float64]) -> NDArray[np.float64]:
    inverse = NormalDist().inv_cdf
    return np.array([inverse(min(max(p, 1e-15), 1 - 1e-15)) for p in u.tolist()])


def _check_step(seconds: float) -> None:
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise ValueError(
            f"a step's seconds must be above 0 and at most {_LONGEST_SECONDS:g}, not {seconds:g}"
        )


def _check_positive(what: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{what} must be above 0, not {value:g}")


def _check_within(what: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{what} must be from {least:g} to {most:g}, not {value:g}")
