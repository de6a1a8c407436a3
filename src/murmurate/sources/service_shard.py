"""A replay shard: a process that stores what its actors send, and draws rows for samplers.

It is the only one that reads or writes its replay, so nothing is locked. ``ServiceProcesses`` starts it; it exits
when its learner does.
"""

from __future__ import annotations

import collections
import contextlib
import functools
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
from murmurate.replay.rate_limiter import RateLimiter
from murmurate.replay.sum_tree import Draw, empty_draw
from murmurate.sources import service_links
from murmurate.sources.polling import use_batch_scheduling
from murmurate.sources.service_control import (
    Field,
    ShardCounts,
    batch_fields,
    receive_state,
    send_state,
)
from murmurate.sources.service_links import Ask, Done, ShardAddress
from murmurate.sources.service_slots import BatchSlots
from murmurate.sources.shared_ring import ActorRing
from murmurate.spec import EnvSpec, Episode, Shapes

_FIRST_PAUSE_SECONDS, _ASKED_SECONDS, _LONGEST_PAUSE_SECONDS = (
    1e-4,
    2e-3,
    1e-2,
)  # between looks into the rings
_IDLE_SECONDS = 1.0  # between two beats of a shard that waits
_EPISODES = 50  # of a message


@dataclass(frozen=True)
class ShardSettings:
    """address: where it is reached; a port of 0 is chosen, if there is a host. config: of this shard. steps,
    discount, behaviour: see ``open_replay``. rings: (descriptor, first simulator, simulators) of each actor.
    listener, counts: descriptors."""

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
    slots: BatchSlots | None = None
    views: dict[tuple[int, int], _Views] = field(default_factory=dict)

    def views_of(self, slots: BatchSlots, slot: int, part: int) -> _Views:
        found = self.views.get((slot, part))
        if found is None:
            columns = part_columns(slots, self.fields, slot, part)
            keys, weights, errors = (columns.pop(name) for name in ("keys", "weights", "errors"))
            found = self.views[slot, part] = _Views(keys, weights, errors, columns)
        return found


def part_columns(slots: BatchSlots, fields: dict[str, Field], slot: int, part: int) -> dict[str, Tensor]:
    """The columns of a part of a slot, as tensors in its memory."""
    rows = slots.layout.rows(part)
    return {
        name: torch.frombuffer(slots.bytes_of(name, slot, rows), dtype=kind).view(-1, *shape)
        for name, (shape, kind) in fields.items()
    }


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
                lambda: self._let_in(_Link(end, self._fields, slots) for end, slots in bridges.accept()),
            )

    def run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            moved = not self._is_paused and (self._serve() | self._insert())
            self._note()
            if moved:
                pause, seconds = _FIRST_PAUSE_SECONDS, 0.0
            elif not self._is_paused and self.limiter.may_insert(self._least):  # actors are waited for
                pause = min(2 * pause, _ASKED_SECONDS if self._asks else _LONGEST_PAUSE_SECONDS)
                seconds = pause
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
        """Take at most one record of each actor, in turn; returns whether there was one."""
        moved = False
        for _ in self._feeds:
            feed = self._feeds[self._next_feed % len(self._feeds)]
            if not self.limiter.may_insert(feed.size):
                break
            self._next_feed += 1
            if feed.ring.waiting_records:
                self._take(feed)
                moved = True
        return moved

    def _take(self, feed: _Feed) -> None:
        """Store a record, then acknowledge it: a record without a mark in the ring was never sent."""
        record = feed.ring.oldest()
        if record.number != feed.taken:
            raise RuntimeError(f"record {record.number} of an actor came where {feed.taken} was due")
        if record.incarnation != feed.incarnation:  # the former one's unfinished transitions never end
            feed.incarnation = record.incarnation
            self.replay.restart(feed.first, feed.size)
        self.replay.observe(feed.first, record.steps)
        self.limiter.inserted += feed.size
        feed.taken += 1
        feed.ring.drop()
        self._version, self._restarts = record.version, self._restarts + record.restarts
        self._episodes += [
            Episode(feed.first + e.simulator, e.episode_return, e.length) for e in record.episodes
        ]

    # -- draws ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._let_in([_Link(connection, self._fields)])

    def _let_in(self, links: Iterable[_Link]) -> None:
        for link in links:
            self._watch(link.socket.fileno(), functools.partial(self._receive, link))

    def _receive(self, link: _Link) -> None:
        try:
            if link.slots is None:
                link.slots = service_links.accept(link.socket)
            while True:
                if not (message := link.socket.recv(64)):
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
        if ask.has_errors:
            views = link.views_of(slots, ask.slot, ask.part)
            self.replay.update(views.keys, views.errors)
        if slots.mark(ask.slot, ask.part) == ask.number:
            self._answer(
                link, ask
            )  # drawn before: its sampler was started again, or its host connected again
        else:
            self._asks.append((link, ask))

    def _serve(self) -> bool:
        """Serve the draws that are allowed, in the order in which they were asked for."""
        moved = False
        while self._asks:
            link, ask = self._asks[0]
            assert link.slots is not None
            rows = link.slots.layout.rows(ask.part)
            count = rows.high - rows.low
            if not self.limiter.may_draw(count) or len(self.replay) < count:
                break
            self._asks.popleft()
            self._draw(link, link.slots, ask, count)
            moved = True
        return moved

    def _draw(self, link: _Link, slots: BatchSlots, ask: Ask, count: int) -> None:
        views = link.views_of(slots, ask.slot, ask.part)
        sampler = self.replay.sampler
        if ask.alpha >= 0:
            sampler.set_alpha(ask.alpha)
        if count not in self._draws:
            self._draws[count] = empty_draw(count)
        out = Draw(self._draws[count].indices, views.weights)
        selection = self.replay.choose(count, ask.beta, out)
        self.replay.write(selection, views.columns)
        views.keys.copy_(selection.keys)
        if not self._uniform:
            # P(i) = count / batch * p_i / sum p, and the weights are (p_i / least p) ** -beta: up to a factor
            # that all shards have, P(i) ** -beta is left
            total, least = sampler.mass
            views.weights.mul_((count * least / total) ** -ask.beta)
        slots.fill(ask.slot, ask.part, ask.number)
        self.limiter.drawn += count
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
        elif command == "load":
            self.load(receive_state(self._control))

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
        ReplayShard(settings, control).run()
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            control.send(("failed", f"{type(error).__name__}: {error}"))
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
