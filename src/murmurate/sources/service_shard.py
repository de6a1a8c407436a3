"""A replay shard: a process that stores what its actors send, and draws rows for samplers.

No other process reads or writes its replay, so nothing is locked. ``ServiceProcesses`` starts the shard; it
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
from murmurate.fabric.processes.spawn import take_signals
from murmurate.replay.config import ReplayConfig, open_replay
from murmurate.replay.interface import Steps
from murmurate.replay.rate_limiter import RateLimiter
from murmurate.replay.tree import Draw, empty_draw
from murmurate.sources import service_links
from murmurate.sources.polling import use_batch_scheduling
from murmurate.sources.service_control import (
    Counts,
    Field,
    ShardCounts,
    batch_fields,
    receive_state,
    row_tensors,
    send_state,
)
from murmurate.sources.service_links import MESSAGE_BYTES, DrawReply, DrawRequest, ShardAddress
from murmurate.sources.service_slots import BatchSlots
from murmurate.sources.shared_ring import ActorRing
from murmurate.spec import EnvSpec, Episode, Shapes

# time between two polls of the rings, while a draw is waiting and otherwise
_REQUESTED_SECONDS, _POLL_SECONDS = 1e-3, 1e-2
_IDLE_SECONDS = 1.0  # between two heartbeats of a shard that waits
_MAX_EPISODES = 50  # the most episodes in one message


@dataclass(frozen=True)
class ShardSettings:
    """The settings of one shard, sent to its process.

    address: where samplers reach the shard, which chooses the port if there is a host and the port is 0.
    config: config of this shard alone. slack: see ``RateLimiter``. steps, discount, behaviour, seed, threads:
    see ``open_replay``. rings: (descriptor, first simulator, number of simulators) of each actor. listener,
    counts: file descriptors. loads: whether the contents of a checkpoint are sent after the settings."""

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
    """The steps of one actor, whose simulators are ``first`` up to ``first + size``.

    taken: number of acknowledged records. incarnation: ``ActorStep.incarnation`` of the last record."""

    ring: ActorRing
    first: int
    size: int
    taken: int = 0
    incarnation: int = -1


class _Views(NamedTuple):
    """The rows of a part in one batch, as tensors in the memory of a slot."""

    keys: Tensor
    weights: Tensor
    errors: Tensor
    columns: dict[str, Tensor]


@dataclass
class _Link:
    """A connection to a sampler; ``slots`` is None before the sampler's hello."""

    socket: socket.socket
    fields: dict[str, Field]
    is_bridge: bool
    slots: BatchSlots | None = None
    views: dict[tuple[int, int], list[_Views]] = field(default_factory=dict)

    def views_of(self, slots: BatchSlots, slot: int, part: int) -> list[_Views]:
        """The views of a part's rows, one for each batch of a block."""
        views = self.views.get((slot, part))
        if views is None:
            views = self.views[slot, part] = []
            for number in range(slots.layout.block):
                columns = row_tensors(slots, self.fields, slot, slots.layout.rows(part, number))
                keys, weights, errors = (columns.pop(name) for name in ("keys", "weights", "errors"))
                views.append(_Views(keys, weights, errors, columns))
        return views


def joined(records: list[Steps]) -> Steps:
    """The records as one step of all their simulators. Requires that all or none have action values."""
    if len(records) == 1:
        return records[0]
    names = [n for n in Steps._fields if n != "behaviour" and getattr(records[0], n) is not None]
    values: dict[str, Any] = {name: torch.cat([getattr(steps, name) for steps in records]) for name in names}
    outputs = records[0].behaviour
    behaviour = {name: torch.cat([steps.behaviour[name] for steps in records]) for name in outputs}
    return Steps(**values, behaviour=behaviour)


class ReplayShard:
    """The shard's loop: take steps and serve draws, as far as the rate limiter allows."""

    def __init__(self, settings: ShardSettings, control: Connection) -> None:
        self.config, self._control = settings.config, control
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
        self._smallest_record = min(feed.size for feed in self._feeds)
        self._counts = ShardCounts(SharedMemoryFile(settings.counts))
        self._version = self._restarts = 0
        self._episodes: collections.deque[Episode] = collections.deque()
        self._fields = batch_fields(settings.spec, settings.behaviour)
        self._requests: collections.deque[tuple[_Link, DrawRequest]] = collections.deque()
        self._draws: dict[int, Draw] = {}  # number of rows -> memory for their indices
        self._is_paused = False
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._listener = socket.socket(fileno=settings.listener)
        self._watch(self._listener.fileno(), self._accept)
        self._watch(control.fileno(), self._handle_command)
        if settings.address.host:
            from murmurate.sources.service_bridge import Bridges  # it needs the package cryptography

            bridges = Bridges(settings.address)
            self._send("listening", bridges.port)
            self._watch(
                bridges.arrived,
                lambda: self._add_links(
                    _Link(link, self._fields, True, slots) for link, slots in bridges.accept()
                ),
            )

    def run(self) -> None:
        while True:
            has_worked = not self._is_paused and (self._serve() | self._insert())
            self._report_counts()
            if has_worked:
                seconds = 0.0
            elif not self._is_paused and self.limiter.may_insert(self._smallest_record):  # waiting for actors
                seconds = _REQUESTED_SECONDS if self._requests else _POLL_SECONDS
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
        """Take at most one record of each actor, in turn; returns whether there was any.

        The records of consecutive actors are inserted together, which costs little more than a single record.
        """
        feeds, start = self._feeds, self._next_feed
        consecutive: list[_Feed] = []
        size, has_inserted = 0, False
        for offset in range(len(feeds)):
            feed = feeds[(start + offset) % len(feeds)]
            if not self.limiter.may_insert(size + feed.size):
                break
            if not feed.ring.waiting_records:
                continue
            if consecutive and consecutive[-1].first + consecutive[-1].size != feed.first:
                self._store_records(consecutive)
                consecutive, size = [], 0
            consecutive.append(feed)
            size, has_inserted = size + feed.size, True
            self._next_feed = (start + offset + 1) % len(feeds)
        if consecutive:
            self._store_records(consecutive)
        return has_inserted

    def _store_records(self, feeds: list[_Feed]) -> None:
        """Store the oldest record of each actor, then acknowledge them all by freeing their slots."""
        records = []
        for feed in feeds:
            record = feed.ring.oldest()
            if record.number != feed.taken:
                raise RuntimeError(f"record {record.number} of an actor came where {feed.taken} was due")
            if record.incarnation != feed.incarnation:  # its previous process left transitions unfinished
                feed.incarnation = record.incarnation
                self.replay.restart(feed.first, feed.size)
            self._episodes += [episode.numbered_from(feed.first) for episode in record.episodes]
            self._version, self._restarts = record.version, self._restarts + record.restarts
            records.append(record.steps)
        first = feeds[0].first
        for _, group in itertools.groupby(records, lambda steps: steps.action_value is None):
            steps = joined(list(group))
            self.replay.observe(first, steps)
            first += steps.reward.shape[0]
        for feed in feeds:
            self.limiter.inserted += feed.size
            feed.taken += 1
            feed.ring.drop()

    # -- draws ------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._add_links([_Link(connection, self._fields, False)])

    def _add_links(self, links: Iterable[_Link]) -> None:
        for link in links:
            self._watch(link.socket.fileno(), functools.partial(self._receive, link))

    def _receive(self, link: _Link) -> None:
        try:
            if link.slots is None:
                link.slots = service_links.accept(link.socket)
            while True:
                if not (message := link.socket.recv(MESSAGE_BYTES)):
                    raise ConnectionError("the sampler ended")
                self._take_request(link, link.slots, DrawRequest.read(message))
        except BlockingIOError:
            pass
        except OSError:
            self._drop_link(link)

    def _drop_link(self, link: _Link) -> None:
        """Forget a connection and its requests: a sampler that is started again repeats them."""
        descriptor = link.socket.fileno()
        self._poll.unregister(descriptor)
        del self._handlers[descriptor]
        link.socket.close()
        self._requests = collections.deque(pair for pair in self._requests if pair[0] is not link)

    def _take_request(self, link: _Link, slots: BatchSlots, request: DrawRequest) -> None:
        # once this request's draw is written, the rows that the errors belong to are overwritten
        if slots.mark(request.slot, request.part) != request.number:
            for number, views in enumerate(link.views_of(slots, request.slot, request.part)):
                if request.error_bits >> number & 1:
                    self.replay.update(views.keys, views.errors)
        self._requests.append((link, request))

    def _serve(self) -> bool:
        """Serve the requested draws in order, as far as the limiter allows; returns whether any was drawn."""
        has_drawn = False
        while self._requests:
            link, request = self._requests[0]
            assert link.slots is not None
            if link.slots.mark(request.slot, request.part) == request.number:
                self._requests.popleft()  # drawn already, before the sampler restarted or reconnected
                self._answer(link, request)
                continue
            count = link.slots.layout.count(request.part)
            if not self.limiter.may_draw(count) or len(self.replay) < count // link.slots.layout.block:
                break
            self._requests.popleft()
            self._draw(link, link.slots, request)
            self.limiter.drawn += count
            has_drawn = True
        return has_drawn

    def _draw(self, link: _Link, slots: BatchSlots, request: DrawRequest) -> None:
        replay = self.replay
        if request.alpha >= 0:
            replay.sampler.set_alpha(request.alpha)
        for views in link.views_of(slots, request.slot, request.part):
            count = views.keys.shape[0]
            if count not in self._draws:
                self._draws[count] = empty_draw(count)
            selection = replay.choose(count, request.beta, Draw(self._draws[count].indices, views.weights))
            replay.write(selection, views.columns)
            views.keys.copy_(selection.keys)
            if replay.sampler.weighted:
                # P(i) = count / batch * p_i / sum p, and the weights are (p_i / least p) ** -beta: make them
                # P(i) ** -beta, up to a factor that is the same in all shards
                total, least = replay.sampler.mass
                views.weights.mul_((count * least / total) ** -request.beta)
        slots.fill(request.slot, request.part, request.number)
        if link.is_bridge or slots.is_complete(request.slot):  # else the last shard wakes the sampler
            self._answer(link, request)

    def _answer(self, link: _Link, request: DrawRequest) -> None:
        # the sampler may have ended, or its socket may be full: then the slot's marks say what was drawn
        with contextlib.suppress(OSError):
            link.socket.send(DrawReply(request.slot, request.part, request.number).pack())

    # -- the learner ------------------------------------------------------------------------------------

    def _report_counts(self) -> None:
        inserted, drawn = self.limiter.inserted, self.limiter.drawn
        self._counts.set(Counts(inserted, drawn, len(self.replay), self._version, self._restarts))
        self._counts.beat()
        if self._episodes and self._may_send():
            count = min(_MAX_EPISODES, len(self._episodes))
            self._send("episodes", [self._episodes.popleft() for _ in range(count)])

    def _may_send(self) -> bool:
        poll = select.poll()  # select.select takes no descriptor above 1,023
        poll.register(self._control, select.POLLOUT)
        return bool(poll.poll(0))

    def _send(self, kind: str, content: Any) -> None:
        self._control.send((kind, content))
        self._counts.note_message()

    def _handle_command(self) -> None:
        try:
            command = self._control.recv()
        except (EOFError, OSError):
            os._exit(0)
        if command == "pause":
            self._is_paused = True
        elif command == "resume":
            self._is_paused = False
        elif command == "state":
            self._send("state", None)
            send_state(self._control, self.state())

    def state(self) -> dict[str, Any]:
        store = self.replay.state() if self.config.saved else None
        return {"store": store, "inserted": self.limiter.inserted, "drawn": self.limiter.drawn}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Without a store, the replay is empty; draws begin once it has a batch."""
        self.limiter.inserted, self.limiter.drawn = int(state["inserted"]), int(state["drawn"])
        if state["store"] is not None:
            self.replay.load(state["store"])


def main(descriptor: int) -> None:
    # a scheduler may send SIGTERM to all processes of a job; the learner ends this one after the last save
    take_signals(signal.SIG_IGN)
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
