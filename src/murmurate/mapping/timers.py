"""Times the primitives of a running training loop, without changing it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from murmurate.mapping.primitives import OF_MODEL
from murmurate.replica.vector import Exchange, Replica
from murmurate.replicator.learner import Learner
from murmurate.spec import TimeStep
from murmurate.training.loop import TrainingLoop

# functions that run while the source makes its next batch
_WITHIN_SOURCE = ("act", "simulate", "insert", "draw")


class Call(NamedTuple):
    """A call of a function that is timed by itself. updates, sizes: how many updates each vector of the
    learner made in it, and how many parameters it has, by the vector's name."""

    seconds: float
    updates: dict[str, int]
    sizes: dict[str, int]


class ModelCalls(NamedTuple):
    """Calls of a primitive of a model. seconds: of each. vectors: (number of parameters, updates in a call)
    of each vector that makes updates in them."""

    seconds: list[float]
    vectors: list[tuple[int, float]]

    @classmethod
    def of(cls, primitive: str, calls: Sequence[Call]) -> ModelCalls:
        """From timed calls: a fit is as many calls of the primitive as it has gradient steps."""
        kept = calls[1:] or calls  # the first is slower than those that follow, as its memory is new
        parts = [max(call.updates.values()) if primitive == "fit" else 1 for call in kept]
        updates = {name: sum(call.updates[name] for call in kept) / sum(parts) for name in kept[0].sizes}
        vectors = [(size, updates[name]) for name, size in kept[0].sizes.items() if updates[name]]
        return cls([call.seconds / n for call, n in zip(kept, parts, strict=True)], vectors)


class Clock:
    """Adds up the seconds spent in named functions; ``taken`` returns the sums and resets them.

    calls: what was timed ``apart``, by name. steps: for each iteration, also the one that is running, when
    the strategy's steps began in it.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, list[Call]] = defaultdict(list)
        self.steps: list[list[float]] = [[]]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        seconds, now = self._seconds, time.perf_counter

        def call(*arguments: Any, **options: Any) -> Any:
            began = now()
            result = function(*arguments, **options)
            seconds[name] += now() - began
            return result

        return call

    def waiting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """As ``timed``, but counts only the time in which this thread does not compute."""
        seconds, now, computing = self._seconds, time.perf_counter, time.thread_time

        def call(*arguments: Any, **options: Any) -> Any:
            began, began_computing = now(), computing()
            result = function(*arguments, **options)
            seconds[name] += max(0.0, now() - began - (computing() - began_computing))
            return result

        return call

    def apart(self, name: str, function: Callable[..., Any], learner: Learner) -> Callable[..., Any]:
        """As ``timed``, but keeps each call, in ``calls``; of its seconds, and of those of functions that it
        calls, only the sum ``apart`` is kept. One that returns False was interrupted, and does not count."""
        seconds, now = self._seconds, time.perf_counter

        def call(*arguments: Any, **options: Any) -> Any:
            before, clocks = dict(seconds), _clocks(learner)
            began = now()
            result = function(*arguments, **options)
            spent = now() - began
            seconds.clear()
            seconds.update(before)
            seconds["apart"] += spent
            if result is not False:
                updates = {vector: clock - clocks[vector] for vector, clock in _clocks(learner).items()}
                sizes = {vector: len(replica) for vector, replica in learner.replicas.items()}
                self.calls[name].append(Call(spent, updates, sizes))
            return result

        return call

    def taken(self) -> dict[str, float]:
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds


def _clocks(learner: Learner) -> dict[str, int]:
    return {name: replica.clock for name, replica in learner.replicas.items()}


class TimedWorld:
    """A world whose simulators are timed."""

    def __init__(self, world: Any, clock: Clock) -> None:
        self._world, self._clock = world, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def shared_by(self, simulators: int) -> TimedWorld:
        return TimedWorld(self._world.shared_by(simulators), self._clock)

    def open(self, simulators: int, **options: Any) -> _TimedSimulators:
        return _TimedSimulators(self._world.open(simulators, **options), self._clock)


class _TimedSimulators:
    def __init__(self, simulators: Any, clock: Clock) -> None:
        self._simulators = simulators
        self._send = clock.timed("simulate", simulators.send)
        self._receive = clock.timed("simulate", clock.waiting("wait", simulators.receive))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._simulators, name)

    def send(self, action: Tensor) -> None:
        self._send(action)

    def receive(self) -> TimeStep:
        return self._receive()  # type: ignore[no-any-return]


def attach(loop: TrainingLoop, clock: Clock, iterations: list[dict[str, float]]) -> None:
    """Make ``loop`` append the seconds of each iteration to ``iterations``: by primitive, and ``total``."""
    learner: Any = loop.learner
    source: Any = loop.source
    for name, owner, method in (("learn", learner, "learn"), ("act", learner, "act")):
        if hasattr(owner, method):
            setattr(owner, method, clock.timed(name, getattr(owner, method)))
    sampler: Any = getattr(source, "sampler", None)
    if hasattr(sampler, "roll_out"):
        setattr(learner, "fit", clock.apart("fit", learner.fit, learner))  # noqa: B010
        sampler.roll_out = clock.apart("imagine", sampler.roll_out, learner)
        # inserting may compute priorities, and a batch is drawn from two replays
        sampler.insert = clock.timed("insert", sampler.insert)
        sampler.draw = clock.timed("draw", sampler.draw)
    elif (replay := getattr(source, "replay", None)) is not None:
        for method in ("next", "before_steps"):  # both wait for copies that were begun ahead
            setattr(sampler, method, clock.timed("draw", getattr(sampler, method)))
        for method, name in (("observe", "insert"), ("choose", "sample"), ("update", "priority")):
            if hasattr(replay, method):  # sequences are drawn and read in one call, and have no priorities
                setattr(replay, method, clock.timed(name, getattr(replay, method)))
    for replica in learner.replicas.values():
        _attach_replica(replica, clock)
    loop.source = _TimedSource(source, clock)
    original = loop.timer.end_iteration
    last = [time.perf_counter()]  # when the last iteration ended

    def end_iteration() -> None:
        original()
        now = time.perf_counter()
        iterations.append(primitives_of(clock.taken(), now - last[0]))
        clock.steps.append([])
        last[0] = now

    setattr(loop.timer, "end_iteration", end_iteration)  # noqa: B010


class _TimedSource:
    def __init__(self, source: Any, clock: Clock) -> None:
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "_next", clock.timed("next", source.__next__))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._source, name, value)

    def __iter__(self) -> _TimedSource:
        return self

    def __next__(self) -> Any:
        return self._next()


def _attach_replica(replica: Replica, clock: Clock) -> None:
    timed: Callable[[Replica], Exchange] = clock.timed("step", replica.exchange)

    def exchange(replica: Replica) -> Exchange:
        clock.steps[-1].append(time.perf_counter())
        return timed(replica)

    replica.exchange = exchange
    for name in ("descend", "follow"):  # two ways to make the strategy's step
        setattr(replica, name, clock.timed("descend", getattr(replica, name)))


def primitives_of(seconds: Mapping[str, float], total: float) -> dict[str, float]:
    """The seconds of an iteration by primitive, from the seconds of the timed functions. ``gather`` is the
    rest of the time in which a batch is drawn, ``collect`` of the source's time, ``loop`` of the iteration's.

    ``update`` is the strategy's step, which for the single replica of a pilot has no exchange. Of learners
    that ``follow`` a gradient, ``forward`` contains its computation, and ``backward`` only a copy of it.
    ``wait`` is the part of ``simulate`` in which this thread waited for others, which step the simulators.
    What the source did ``apart`` is left out of all of them, and of the total: the primitives of a model, for
    which stands 0.
    """
    found = {name: seconds.get(name, 0.0) for name in ("act", "simulate", "insert", "sample", "priority")}
    found["gather"] = max(0.0, seconds.get("draw", 0.0) - found["sample"])
    total -= seconds.get("apart", 0.0)
    collecting = seconds.get("next", 0.0) - seconds.get("apart", 0.0)
    found["collect"] = max(0.0, collecting - sum(seconds.get(name, 0.0) for name in _WITHIN_SOURCE))
    learn, descend, step = (seconds.get(name, 0.0) for name in ("learn", "descend", "step"))
    found["forward"] = max(0.0, learn - descend)
    found["backward"] = max(0.0, descend - step)
    found["update"] = step
    found["loop"] = max(0.0, total - collecting - learn - found["priority"])
    found |= dict.fromkeys(OF_MODEL, 0.0)
    return {**found, "wait": seconds.get("wait", 0.0), "total": total}
