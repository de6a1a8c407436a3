"""A learner's end of a replay service: starts its own shards, samplers and actors, and yields the batches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from murmurate.agents.interface import Agent
from murmurate.fabric.processes.module_process import ModuleProcess
from murmurate.replay.config import ReplayConfig
from murmurate.replay.interface import Sample
from murmurate.replicator.learner import updates_of
from murmurate.sources.actor_processes import ActorPlan, ActorProcesses
from murmurate.sources.interface import SourceContext
from murmurate.sources.replay_sampler import on_device
from murmurate.sources.service_control import batch_fields, row_tensors
from murmurate.sources.service_links import ShardAddress
from murmurate.sources.service_processes import SamplerProcess, ServiceProcesses, empty_state
from murmurate.sources.service_shard import ShardSettings
from murmurate.sources.service_slots import DRAWING, READY, BatchSlots, SlotLayout, SlotRows
from murmurate.sources.shared_ring import ActorRing
from murmurate.sources.simulator_groups import check_loaded_simulators
from murmurate.spec import Batch, Episode, derive_generator, derive_seed

_WAIT_SECONDS = 0.05  # the longest wait for a batch between two calls of ``alive``
_ADDRESS_BYTES = 512  # size of a shard's address on the channel
_COUNTS = ("inserted", "drawn", "reported")  # names of a shard's counts in a saved state


@dataclass
class _Slot:
    """Slot ``number`` of a sampler's ``slots``.

    samples, errors: for each batch of the block, views of the slot's memory. handed: number of batches of the
    block that were handed out. error_bits: a bit for each batch, set if the batch has errors.
    """

    sampler: SamplerProcess
    slots: BatchSlots
    number: int
    samples: list[Sample]
    errors: list[Tensor]
    handed: int = 0
    error_bits: int = 0


@dataclass
class ServiceBatch(Batch):
    """A batch whose ``feedback`` goes to the shards that it was drawn from."""

    slot: _Slot | None = None
    number: int = 0  # index of the batch in the block

    def feedback(self, priorities: Tensor | None) -> None:
        if priorities is not None and self.slot is not None:
            self.slot.errors[self.number].copy_(priorities.detach())
            self.slot.error_bits |= 1 << self.number


class ServiceSource:
    """Yields ``Batch(data=Sample)`` without end (a ``Source``); a batch is valid until the next is requested.

    shards: settings of this learner's shards. actors: for each shard, its first actor and one after its last.
    samplers: number of samplers of this learner.

    A batch that was drawn is handed out once, even if the sampler that requested it dies. Batches that are
    waiting when a checkpoint is taken count as drawn, and a resumed run does not have them.
    """

    exact = False  # neither the state of actors nor the order of draws is saved

    def __init__(
        self,
        plan: ActorPlan,
        context: SourceContext,
        config: ReplayConfig,
        shards: Sequence[ShardSettings],
        actors: Sequence[tuple[int, int]],
        samplers: int,
        layout: SlotLayout,
    ) -> None:
        self.plan, self.config = plan, config
        self.learner = cast(Agent, context.learner)
        self.alive: Callable[[int], bool] = lambda played: False
        self._context, self._layout = context, layout
        self._seed = derive_seed(context.run.seed, "source", plan.rank)
        spec, behaviour = shards[0].spec, shards[0].behaviour
        self._actors = ActorProcesses(
            plan,
            self.learner,
            "murmurate.sources.actor",
            lambda memory_file, size: ActorRing(memory_file, spec, size, behaviour),
            seed=self._seed,
        )
        # of each shard: its first simulator, descriptors of its actors' rings, its settings
        self._first_simulators, rings, settings = [], [], []
        for shard, (start, stop) in zip(shards, actors, strict=True):
            feeders = self._actors.actors[start:stop]
            first = feeders[0].first_simulator
            self._first_simulators.append(first)
            rings.append([a.memory_file.descriptor for a in feeders])
            described = [(a.memory_file.descriptor, a.first_simulator - first, a.simulators) for a in feeders]
            settings.append(dataclasses.replace(shard, rings=tuple(described)))
        self._processes = ServiceProcesses(plan.rank, settings, rings, samplers, layout)
        self._fields = batch_fields(spec, behaviour)
        self._slots = [
            self._slot(sampler, number)
            for number in range(layout.slots)
            for sampler in self._processes.samplers
        ]
        # ``_current_slot``: the slot whose batches are being handed out
        self._next_slot, self._current_slot = 0, cast(_Slot | None, None)
        self._peers = _Peers(context, len(shards)) if plan.replicas > 1 else None
        self._states: list[dict[str, Any] | None] = [None] * len(shards)  # that the shards start with
        self._is_paused = False
        self._batches = 0
        self._connected_before = 0
        self._events: list[tuple[str, str]] = []

    def _slot(self, sampler: SamplerProcess, number: int) -> _Slot:
        size, samples, errors = self._layout.batch, [], []
        for k in range(self._layout.block):
            columns = row_tensors(sampler.slots, self._fields, number, SlotRows(k * size, (k + 1) * size))
            errors.append(columns.pop("errors"))
            behaviour = {n.partition(".")[2]: x for n, x in columns.items() if n.startswith("behaviour.")}
            plain = {name: x for name, x in columns.items() if not name.startswith("behaviour.")}
            samples.append(Sample(**plain, behaviour=behaviour))
        return _Slot(sampler, sampler.slots, number, samples, errors)

    # -- batches ----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._start()
        if self._current_slot is not None and self._current_slot.handed == self._layout.block:
            self._release(self._current_slot)
        while (slot := self._next_ready()) is None:
            self._processes.wait_ready(_WAIT_SECONDS)
            self._supervise()
            if self.alive(self._new_steps(report=False)):
                return Batch(None, self._new_steps(), self._new_episodes())
        self._supervise()
        self._current_slot, number = slot, slot.handed
        slot.handed += 1
        self._batches += 1
        sample = slot.samples[number]
        sample.weights.div_(sample.weights.max())
        data = on_device(sample, self._context.device)
        return ServiceBatch(data, self._new_steps(), self._new_episodes(), slot=slot, number=number)

    def _next_ready(self) -> _Slot | None:
        """The slot with the next batch: the current slot, or else the next ready one in turn, if any."""
        if self._current_slot is not None:
            return self._current_slot
        count = len(self._slots)
        for step in range(count):
            slot = self._slots[(self._next_slot + step) % count]
            if slot.slots.state(slot.number) == READY:
                self._next_slot = (self._next_slot + step + 1) % count
                return slot
        return None

    def _release(self, slot: _Slot) -> None:
        """Give a slot whose batches were all used back to its sampler, with the errors of the batches."""
        slot.slots.set_exponents(*self._exponents())
        slot.slots.release(slot.number, slot.error_bits)
        slot.sampler.wake()
        self._current_slot, slot.handed, slot.error_bits = None, 0, 0

    def _exponents(self) -> tuple[float, float]:
        progress = self._context.progress()
        alpha = -1.0 if self.config.alpha_end is None else self.config.alpha_at(progress)
        return self.config.beta_at(progress), alpha

    def _new_steps(self, report: bool = True) -> int:
        """Number of env steps inserted into this learner's shards since the last call with ``report``."""
        new_steps = 0
        for shard in self._processes.shards:
            # the shard's count is 0 until it has loaded its state
            inserted = max(shard.counts.read().inserted, shard.reported_steps)
            new_steps += inserted - shard.reported_steps
            if report:
                shard.reported_steps = inserted
        return new_steps

    def _new_episodes(self) -> list[Episode]:
        """Episodes that ended since the last call."""
        episodes = []
        for first, shard in zip(self._first_simulators, self._processes.shards, strict=True):
            shard.receive_messages()
            if shard.episodes:
                episodes += [episode.numbered_from(first) for episode in shard.episodes]
                shard.episodes = []
        return episodes

    # -- processes --------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Publish parameters if due; at the first call, start all processes; end a ``hold``."""
        processes = self._processes
        self._actors.publish_if_due(self.config.publish_every)
        if not processes.has_started:
            for slot in self._slots:
                slot.slots.set_exponents(*self._exponents())
            processes.start(self._states)
            for shard, state in zip(processes.shards, self._states, strict=True):
                # steps that had not been reported when the state was saved are reported now
                reported = 0 if state is None else state.get("reported", state["inserted"])
                shard.reported_steps = int(reported)
            self._states = []
            self._actors.start(self._batches, processes.reported_steps)
        if self._is_paused:
            self._is_paused = False
            for shard in processes.shards:
                shard.send("resume")

    def _supervise(self) -> None:
        """From time to time, restart dead processes, and send samplers the addresses of new shards."""
        if not self._processes.check():
            return
        for actor in self._actors.actors:
            if actor.ring.beats != actor.beats:
                actor.beats = actor.ring.beats
                actor.note_record()
        self._actors.check(self._batches, self._processes.reported_steps)
        own = [shard.address for shard in self._processes.shards if shard.is_listening]
        if len(own) == len(self._processes.shards):
            addresses = own if self._peers is None else self._peers.exchange(own)
            numbered = {a.rank * len(own) + a.index: a for a in addresses}
            new = {n: a for n, a in numbered.items() if self._processes.addresses.get(n) != a}
            if new:
                self._processes.send(new)
        for shard in self._processes.shards:
            shard.receive_messages()
        connected = min(sampler.slots.shards for sampler in self._processes.samplers)
        if connected < self._connected_before:
            self._events.append(
                ("replay shard gone", f"replica {self.plan.rank} draws from {connected} replay shard(s) now")
            )
        self._connected_before = connected

    def fields(self) -> dict[str, Any]:
        counts = [shard.counts.read() for shard in self._processes.shards]
        starts = sum(shard.settings.config.learning_starts for shard in self._processes.shards)
        after_starts = sum(c.inserted for c in counts) - starts
        exponents = self._exponents()
        restarts = sum(c.restarts for c in counts)
        newest = updates_of(self.learner) + 1
        # a shard to which no step has come, as after a resume, has no version
        oldest = min((c.version for c in counts if c.version), default=newest)
        return {
            "replay_transitions": sum(c.transitions for c in counts),
            "samples_per_insert": sum(c.drawn for c in counts) / max(after_starts, 1),
            "beta": exponents[0],
            **({} if self.config.alpha_end is None else {"alpha": exponents[1]}),
            "actor_lag_updates": newest - oldest,
            "actor_deaths": self._actors.deaths,
            "sampler_deaths": self._processes.deaths,
            **({"simulator_restarts": restarts} if restarts else {}),
        }

    def events(self) -> Sequence[tuple[str, str]]:
        events = [*self._processes.events, *self._actors.taken_events(), *self._events]
        self._processes.events, self._events = [], []
        return events

    # -- counts ------------------------------------------------------------------------------------------

    @property
    def pids(self) -> dict[str, list[int]]:
        """The process ids of the living processes, by kind."""
        watched: dict[str, list[ModuleProcess | None]] = {
            "shards": [shard.watched.process for shard in self._processes.shards],
            "samplers": [sampler.watched.process for sampler in self._processes.samplers],
            "actors": [actor.process for actor in self._actors.actors],
        }
        return {
            kind: [p.pid for p in processes if p is not None and p.poll() is None]
            for kind, processes in watched.items()
        }

    @property
    def sent_records(self) -> int:
        """Number of records that all actors have sent, acknowledged or not."""
        return sum(actor.ring.beats for actor in self._actors.actors)

    @property
    def acknowledged(self) -> int:
        """Env steps that the shards have acknowledged to the actors."""
        return sum(actor.ring.taken * actor.simulators for actor in self._actors.actors)

    @property
    def waiting_draws(self) -> int:
        """Number of rows that were drawn and not handed out, in slots that are ready or being filled."""
        count = 0
        for slot in self._slots:
            state = slot.slots.state(slot.number)
            if state in (DRAWING, READY):
                for part in range(self._layout.parts):
                    count += self._layout.count(part) * slot.slots.is_filled(slot.number, part)
                count -= self._layout.batch * slot.handed
        return count

    def hold(self) -> None:
        """Pause the shards until the next batch, so that counts can be compared."""
        self._is_paused = True
        for shard in self._processes.shards:
            shard.send("pause")

    # -- state ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Call it between two batches only. The actors' unfinished episodes are lost."""
        has_started = self._processes.has_started
        shards = self._states
        if has_started:
            shards = [s.state() | {"reported": s.reported_steps} for s in self._processes.shards]
        generator = derive_generator(self._seed, f"actions after batch {self._batches}")
        return {
            "batches": self._batches,
            "shards": [{name: s.get(name, s["inserted"]) if s else 0 for name in _COUNTS} for s in shards],
            "replays": {
                f"shard{k}": {"store": s["store"]}
                for k, s in enumerate(shards)
                if s and s["store"] is not None
            },
            "groups": [None],  # this and below: what a ``ReplaySource`` needs to load the state
            "generator": generator.get_state(),
            "first": torch.ones(self.plan.simulators, dtype=torch.bool),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; actors begin new episodes, with new seeds. A replay that was not saved is
        empty, and the learner goes on as soon as a batch can be drawn."""
        check_loaded_simulators(state, self.plan.simulators)
        if len(state["shards"]) != len(self._states):
            raise ValueError(f"the state is of {len(state['shards'])} shards, not {len(self._states)}")
        self._batches = int(state["batches"])
        self._states = []
        for index, counts in enumerate(state["shards"]):
            saved = state["replays"].get(f"shard{index}")
            self._states.append(
                self._empty_state(index) if saved is None else {**counts, "store": saved["store"]}
            )

    def _empty_state(self, index: int) -> dict[str, Any]:
        shards = self._processes.shards
        config, random_env_steps = shards[index].settings.config, self.plan.random_env_steps // len(shards)
        return empty_state(config, random_env_steps if self._batches else None)

    def fresh_start(self, batches: int) -> None:
        """Begin with empty shards; to be called before the actors have started."""
        self._batches = batches
        self._states = [self._empty_state(index) for index in range(len(self._states))]

    def close(self) -> None:
        self._processes.close()
        self._actors.close()


class _Peers:
    """Exchanges the addresses of shards with the other learners."""

    def __init__(self, context: SourceContext, shards: int) -> None:
        self._size = shards * _ADDRESS_BYTES
        like = torch.zeros(self._size // 8, dtype=torch.int64)
        self._channel = context.channel("replay service", like)
        self._other_ranks = [rank for rank in range(context.run.replicas) if rank != context.rank]
        self._seen_versions: dict[int, int] = {}  # rank -> version of the addresses last read
        self._known: dict[int, list[ShardAddress]] = {}  # rank -> addresses
        self._published: list[ShardAddress] = []

    def exchange(self, own: list[ShardAddress]) -> list[ShardAddress]:
        """Publish ``own``, the addresses of this learner's shards; returns those of all learners' shards, or
        none before all living learners have published theirs."""
        channel = self._channel
        if own != self._published:
            self._published = own
            text = json.dumps([dataclasses.asdict(address) for address in own]).encode().ljust(self._size)
            channel.publish(torch.frombuffer(bytearray(text), dtype=torch.int64))
        living = set(channel.living())
        for rank in self._other_ranks:
            version = channel.version(rank)
            if rank in living and version > self._seen_versions.get(rank, 0):
                vector, self._seen_versions[rank] = channel.peek(rank)
                text = vector.numpy().tobytes()
                self._known[rank] = [ShardAddress(**fields) for fields in json.loads(text)]
        if any(rank in living and rank not in self._known for rank in self._other_ranks):
            return []
        return own + [address for rank in self._other_ranks for address in self._known.get(rank, [])]
