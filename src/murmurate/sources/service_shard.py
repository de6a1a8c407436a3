"""A replay shard: a process that stores what its actors send, and draws rows for samplers.

It is the only one that reads or writes its replay, so nothing is locked. ``ServiceProcesses`` starts it; it
exits when its learner does.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.replay.config import ReplayConfig, open_replay
from murmurate.replay.interface import Steps
from murmurate.replay.rate_limiter import RateLimiter
from murmurate.replay.sum_tree import Draw, empty_draw
from murmurate.sources import service_links
from murmurate.sources.polling import use_batch_scheduling
from murmurate.sources.service_control import (
    Field,
    ShardCounts,
    batch_fields,
    receive_state,
    row_tensors,
    send_state,
)
from murmurate.sources.service_links import MESSAGE_BYTES, Ask, Done, ShardAddress
from murmurate.sources.service_slots import BatchSlots
from murmurate.sources.shared_ring import ActorRing
from murmurate.spec import EnvSpec, Episode, Shapes

# between two looks into the rings: with a draw that waits, and without
_ASKED_SECONDS, _LOOK_SECONDS = 1e-3, 1e-2
_IDLE_SECONDS = 1.0  # between two beats of a shard that waits
_EPISODES = 50  # of a message


@dataclass(frozen=True)
class ShardSettings:
    """address: where it is reached; a port of 0 is chosen, if there is a host. config: of this shard. steps,
    discount, behaviour: see ``open_replay``. rings: (descriptor, first simulator, simulators) of each actor.
    listener, counts: descriptors. loads: whether its contents follow."""

    address: ShardAddress
    spec: EnvSpec
    config: ReplayConfig
    slack: int
    steps: int
    discount: float
    behaviour: Shapes
    seed: int
    threads: int
    rings: tuple[tuple[int, int, int], ...] = ()
    listener: int = -1
    counts: int = -1
    loads: bool = False


@dataclass
class _Feed:
    """The steps of one actor. taken: those acknowledged. incarnation: of the actor that made the last."""

    ring: ActorRing
    first: int
    size: int
    taken: int = 0
    incarnation: int = -1


class _Views(NamedTuple):
    keys: Tensor
    weights: Tensor
    errors: Tensor
    columns: dict[str, Tensor]


@dataclass
class _Link:
    """A connection to a sampler; ``slots`` is None before its hello."""

    socket: socket.socket
    fields: dict[str, Field]
    is_bridge: bool
    slots: BatchSlots | None = None
    views: dict[tuple[int, int], list[_Views]] = field(default_factory=dict)

    def views_of(self, slots: BatchSlots, slot: int, part: int) -> list[_Views]:
        """Of a part, in each batch of a block."""
        found = self.views.get((slot, part))
        if found is None:
            found = self.views[slot, part] = []
            for number in range(slots.layout.block):
                columns = row_tensors(slots, self.fields, slot, slots.layout.rows(part, number))
                keys, weights, errors = (columns.pop(name) for name in ("keys", "weights", "errors"))
                found.append(_Views(keys, weights, errors, columns))
        return found


def joined(records: list[Steps]) -> Steps:
    """One step of the simulators of all; either all or none have values."""
    if len(records) == 1:
        return records[0]
    names = [n for n in Steps._fields if n != "behaviour" and getattr(records[0], n) is not None]
    values: dict[str, Any] = {name: torch.cat([getattr(steps, name) for steps in records]) for name in names}
    outputs = records[0].behaviour
    behaviour = {name: torch.cat([steps.behaviour[name] for steps in records]) for name in outputs}
    return Steps(**values, behaviour=behaviour)


class ReplayShard:
    """The shard's loop: take steps and serve draws, as far as the limiter allows."""

    def __init__(self, settings: ShardSettings, control: Connection) -> None:
        self.settings, self.config, self._control = settings, settings.config, control
        simulators = sum(size for _, _, size in settings.rings)
        self.replay = open_replay(
            settings.config,
            settings.spec,
            simulators=simulators,
            steps=settings.steps,
            discount=settings.discount,
            seed=settings.seed,
            threads=settings.threads,
            rank=settings.address.rank,
            behaviour=settings.behaviour,
        )
        config = settings.config
        self.limiter = RateLimiter(config.samples_per_insert, config.learning_starts, settings.slack)
        self._feeds = [
            _Feed(ActorRing(SharedMemoryFile(ring), settings.spec, size, settings.behaviour), first, size)
            for ring, first, size in settings.rings
        ]
        self._next_feed = 0
        self._least = min(feed.size for feed in self._feeds)
        self._counts = ShardCounts(SharedMemoryFile(settings.counts))
        self._version = self._restarts = 0
        self._episodes: collections.deque[Episode] = collections.deque()
        self._fields = batch_fields(settings.spec, settings.behaviour)
        self._uniform = config.alpha == 0 and not config.alpha_end
        self._asks: collections.deque[tuple[_Link, Ask]] = collections.deque()
        self._draws: dict[int, Draw] = {}  # by number of rows: memory for their indices
        self._is_paused = False
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._listener = socket.socket(fileno=settings.listener)
        self._watch(self._listener.fileno(), self._accept)
        self._watch(control.fileno(), self._obey)
        if settings.address.host:
            from murmurate.sources.service_bridge import Bridges  # it needs the package cryptography

            bridges = Bridges(settings.address)
            self._tell("listening", bridges.port)
            self._watch(
                bridges.arrived,
                lambda: self._let_in(
                    _Link(end, self._fields, True, slots) for end, slots in bridges.accept()
                ),
            )

    def run(self) -> None:
        while True:
            moved = not self._is_paused and (self._serve() | self._insert())
            self._note()
            if moved:
                seconds = 0.0
            elif not self._is_paused and self.limiter.may_insert(self._least):  # actors are waited for
                seconds = _ASKED_SECONDS if self._asks else _LOOK_SECONDS
            else:
                seconds = _IDLE_SECONDS
            for descriptor, _ in self._poll.poll(seconds):
                handler = self._handlers.get(descriptor)
                if handler is not None:
                    handler()

    def _watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.EPOLLIN)

    # -- inserts ----------------------------------------------------------------------------------------

    def _insert(self) -> bool:
        """Take at most one record of each actor, in turn; returns whether there was one.

        Those of neighbours are inserted together, which costs little more than one alone.
        """
        feeds, start = self._feeds, self._next_feed
        together: list[_Feed] = []
        size, moved = 0, False
        for step in range(len(feeds)):
            feed = feeds[(start + step) % len(feeds)]
            if not self.limiter.may_insert(size + feed.size):
                break
            if not feed.ring.waiting_records:
                continue
            if together and together[-1].first + together[-1].size != feed.first:
                self._take(together)
                together, size = [], 0
            together.append(feed)
            size, moved = size + feed.size, True
            self._next_feed = (start + step + 1) % len(feeds)
        if together:
            self._take(together)
        return moved

    def _take(self, feeds: list[_Feed]) -> None:
        """Store a record of each, then acknowledge it: a record without a mark in the ring was never sent."""
        records = []
        for feed in feeds:
            record = feed.ring.oldest()
            if record.number != feed.taken:
                raise RuntimeError(f"record {record.number} of an actor came where {feed.taken} was due")
            if record.incarnation != feed.incarnation:  # the former one's unfinished transitions never end
                feed.incarnation = record.incarnation
                self.replay.restart(feed.first, feed.size)
            self._episodes += [
                Episode(feed.first + e.simulator, e.episode_return, e.length) for e in record.episodes
            ]
            self._version, self._restarts = record.version, self._restarts + record.restarts
            records.append(record.steps)
        low = feeds[0].first
        for _, group in itertools.groupby(records, lambda steps: steps.action_value is None):
            steps = joined(list(group))
            self.replay.observe(low, steps)
            low += steps.reward.shape[0]
        for feed in feeds:
            self.limiter.inserted += feed.size
            feed.taken += 1
            feed.ring.drop()

    # -- draws ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._let_in([_Link(connection, self._fields, False)])

    def _let_in(self, links: Iterable[_Link]) -> None:
        for link in links:
            self._watch(link.socket.fileno(), functools.partial(self._receive, link))

    def _receive(self, link: _Link) -> None:
        try:
            if link.slots is None:
                link.slots = service_links.accept(link.socket)
            while True:
                if not (message := link.socket.recv(MESSAGE_BYTES)):
                    raise ConnectionError("it ended")
                self._take_ask(link, link.slots, Ask.read(message))
        except BlockingIOError:
            pass
        except OSError:
            self._lose(link)

    def _lose(self, link: _Link) -> None:
        """A sampler that is started again asks again."""
        descriptor = link.socket.fileno()
        self._poll.unregister(descriptor)
        del self._handlers[descriptor]
        link.socket.close()
        self._asks = collections.deque(pair for pair in self._asks if pair[0] is not link)

    def _take_ask(self, link: _Link, slots: BatchSlots, ask: Ask) -> None:
        if slots.mark(ask.slot, ask.part) != ask.number:  # else the rows are those of the next draw already
            for number, views in enumerate(link.views_of(slots, ask.slot, ask.part)):
                if ask.has_errors >> number & 1:
                    self.replay.update(views.keys, views.errors)
        self._asks.append((link, ask))

    def _serve(self) -> bool:
        """Serve the draws that are allowed, in the order in which they were asked for."""
        moved = False
        while self._asks:
            link, ask = self._asks[0]
            assert link.slots is not None
            if link.slots.mark(ask.slot, ask.part) == ask.number:
                self._asks.popleft()  # drawn before: its sampler was started again, or has connected again
                self._answer(link, ask)
                continue
            count = link.slots.layout.count(ask.part)
            if not self.limiter.may_draw(count) or len(self.replay) < count // link.slots.layout.block:
                break
            self._asks.popleft()
            self._draw(link, link.slots, ask)
            self.limiter.drawn += count
            moved = True
        return moved

    def _draw(self, link: _Link, slots: BatchSlots, ask: Ask) -> None:
        replay = self.replay
        if ask.alpha >= 0:
            replay.sampler.set_alpha(ask.alpha)
        for views in link.views_of(slots, ask.slot, ask.part):
            count = views.keys.shape[0]
            if count not in self._draws:
                self._draws[count] = empty_draw(count)
            selection = replay.choose(count, ask.beta, Draw(self._draws[count].indices, views.weights))
            replay.write(selection, views.columns)
            views.keys.copy_(selection.keys)
            if not self._uniform:
                # P(i) = count / batch * p_i / sum p, and the weights are (p_i / least p) ** -beta: up to a
                # factor that all shards have, P(i) ** -beta is left
                total, least = replay.sampler.mass
                views.weights.mul_((count * least / total) ** -ask.beta)
        slots.fill(ask.slot, ask.part, ask.number)
        if link.is_bridge or slots.is_complete(ask.slot):  # else another shard wakes the sampler
            self._answer(link, ask)

    def _answer(self, link: _Link, ask: Ask) -> None:
        with contextlib.suppress(OSError):  # it ended; or it reads nothing, and will look at the marks
            link.socket.send(Done(ask.slot, ask.part, ask.number).pack())

    # -- the learner ------------------------------------------------------------------------------------

    def _note(self) -> None:
        limiter = self.limiter
        self._counts.set(limiter.inserted, limiter.drawn, len(self.replay), self._version, self._restarts)
        self._counts.beat()
        if self._episodes and select.select([], [self._control], [], 0)[1]:
            count = min(_EPISODES, len(self._episodes))
            self._tell("episodes", [self._episodes.popleft() for _ in range(count)])

    def _tell(self, kind: str, content: Any) -> None:
        self._control.send((kind, content))
        self._counts.note_message()

    def _obey(self) -> None:
        try:
            command = self._control.recv()
        except (EOFError, OSError):
            os._exit(0)
        if command == "pause":
            self._is_paused = True
        elif command == "go on":
            self._is_paused = False
        elif command == "state":
            self._tell("state", None)
            send_state(self._control, self.state())

    def state(self) -> dict[str, Any]:
        store = self.replay.state() if self.config.saved else None
        return {"store": store, "inserted": self.limiter.inserted, "drawn": self.limiter.drawn}

    def load(self, state: dict[str, Any]) -> None:
        """Without a store: as at the start of a run whose learners may draw at once."""
        self.limiter.inserted, self.limiter.drawn = int(state["inserted"]), int(state["drawn"])
        if state["store"] is not None:
            self.replay.load(state["store"])


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    control = Connection(descriptor)
    settings: ShardSettings = control.recv()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    use_batch_scheduling()
    try:
        shard = ReplayShard(settings, control)
        if settings.loads:
            shard.load(receive_state(control))
        shard.run()
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            control.send(("failed", f"{type(error).__name__}: {error}"))
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
