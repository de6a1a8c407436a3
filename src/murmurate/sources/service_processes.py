"""Starts and watches the replay shards and samplers of one learner."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import secrets
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from murmurate.errors import RunFailed
from murmurate.fabric.processes.module_process import end_process
from murmurate.fabric.processes.process_handle import is_stopped
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.native.system_calls import memfd
from murmurate.replay.config import ReplayConfig
from murmurate.sources import service_links
from murmurate.sources.service_control import ShardCounts, receive_state, send_state
from murmurate.sources.service_links import ShardAddress, Stream
from murmurate.sources.service_sampler import SamplerSettings
from murmurate.sources.service_shard import ShardSettings
from murmurate.sources.service_slots import BatchSlots, SlotLayout
from murmurate.spec import Episode

_CHECK_SECONDS = 0.5
_STARTUP_SECONDS, _SILENCE_SECONDS = 300.0, 60.0  # the longest wait for the first, and for a later heartbeat
_STOPPED_SECONDS = 10.0  # the longest wait while the operating system reports the process as stopped
_ANSWER_SECONDS = 300  # the longest wait for the contents of a shard
_MAX_DEATHS = 5  # the run fails after so many deaths of a sampler in a row, each without a heartbeat


def shard_config(config: ReplayConfig, shards: int, index: int) -> ReplayConfig:
    """One shard's part of a learner's replay."""
    folder = str(Path(config.folder) / f"shard-{index}") if config.folder else None
    capacity, starts = config.capacity // shards, config.learning_starts // shards
    return dataclasses.replace(config, capacity=capacity, learning_starts=starts, folder=folder)


def empty_state(config: ReplayConfig, random_env_steps: int | None) -> dict[str, Any]:
    """The state of a shard with an empty replay, from which batches are drawn at once.

    random_env_steps: the shard's env steps with random actions at a run's start, which count as made; None
    before the first batch of a run, where none are.
    """
    inserted, drawn = (0, 0) if random_env_steps is None else config.begun_anew(random_env_steps)
    return {"inserted": inserted, "drawn": drawn, "store": None}


@dataclass
class _Watched:
    """A process that is watched. kind: what it is, such as "sampler". where: which process of this kind.

    beats, silent_seconds: number of heartbeats, and time since the last one, as last seen. checked_at: when
    they were seen. silent_deaths: number of starts in a row after which no heartbeat has come, including the
    current start. killed_because: why ``killed_if_suspended`` killed it; else empty."""

    kind: str
    where: str
    process: subprocess.Popen[bytes] | None = None
    beats: float = 0
    silent_seconds: float = 0.0
    checked_at: float = 0.0
    starts: int = 0
    silent_deaths: int = 0
    killed_because: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.where}"

    def note_start(self, process: subprocess.Popen[bytes], beats: float) -> None:
        self.process, self.beats, self.checked_at = process, beats, time.monotonic()
        self.silent_seconds, self.killed_because = 0.0, ""
        self.starts += 1
        self.silent_deaths += 1  # until its first heartbeat

    def cause_of_death(self, beats: float) -> str | None:
        """Why the process has died or counts as hung; None if it works. beats: its heartbeats so far."""
        if self.process is None or self.killed_because:
            return self.killed_because or None
        elapsed = time.monotonic() - self.checked_at
        self.checked_at += elapsed
        # a longer interval is a delay of this process, with which the other may have been suspended too
        self.silent_seconds += min(elapsed, 2 * _CHECK_SECONDS)
        if beats != self.beats:
            self.beats, self.silent_seconds, self.silent_deaths = beats, 0.0, 0
        if (code := self.process.poll()) is not None:
            return f"signal {-code}" if code < 0 else f"exit code {code}"
        silent = self.silent_seconds
        limit = _STARTUP_SECONDS if self.silent_deaths else _SILENCE_SECONDS
        if silent > limit or (silent > _STOPPED_SECONDS and is_stopped(self.process.pid)):
            return f"hung: no sign of life for {silent:.0f} s"
        return None

    @contextlib.contextmanager
    def killed_if_suspended(self) -> Iterator[None]:
        """Used around a wait for the process's answer: kills the process if it is suspended meanwhile for
        ``_STOPPED_SECONDS``, which ends the wait."""
        process, has_answered = self.process, threading.Event()

        def watch() -> None:
            seconds = 0.0  # not by the clock, as this process may be suspended too
            while process is not None and not has_answered.wait(_CHECK_SECONDS):
                seconds = seconds + _CHECK_SECONDS if is_stopped(process.pid) else 0.0
                if seconds > _STOPPED_SECONDS:
                    self.killed_because = f"hung: suspended for {seconds:.0f} s"
                    process.kill()
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            has_answered.set()
            watcher.join()

    def kill(self) -> None:
        if self.process is not None:
            end_process(self.process)
            self.process = None


class ShardProcess:
    """One shard, and what it has reported to the learner."""

    def __init__(self, settings: ShardSettings, rank: int, index: int) -> None:
        self.watched = _Watched("replay shard", f"{index} of replica {rank}")
        self._memory = SharedMemoryFile.create()
        self.counts = ShardCounts(self._memory)
        self.settings = settings
        self.address = settings.address
        self.episodes: list[Episode] = []
        self.is_listening = not settings.address.host
        self.reported_steps = 0  # number of its env steps that were reported to the training loop
        self._received_messages = 0
        self._control: Connection | None = None

    def start(self, rings: Sequence[int], state: dict[str, Any] | None) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _ANSWER_SECONDS, 0))
        with service_links.listen(self.address.name) as listener, theirs:
            settings = dataclasses.replace(
                self.settings,
                listener=listener.fileno(),
                counts=self._memory.descriptor,
                loads=state is not None,
            )
            process = subprocess.Popen(
                [sys.executable, "-m", "murmurate.sources.service_shard", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), listener.fileno(), self._memory.descriptor, *rings),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._control = Connection(ours.detach())
        self.watched.note_start(process, self.counts.beats)
        with self._raising_run_failed(), self.watched.killed_if_suspended():
            self._control.send(settings)
            if state is not None:
                send_state(self._control, state)

    @contextlib.contextmanager
    def _raising_run_failed(self) -> Any:
        """Turn a failed exchange with the shard into a RunFailed that names the shard."""
        try:
            yield
        except (EOFError, OSError) as problem:
            cause = self.watched.cause_of_death(self.counts.beats) or f"no answer: {problem}"
            raise self._failure(cause) from problem

    def _failure(self, cause: str, error: str = "") -> RunFailed:
        """The exception to raise for a shard that is lost. Kills it: one that hangs outlives its learner."""
        self.watched.kill()
        detail = f" ({error})" if error else ""
        return RunFailed(
            f"{self.watched.name} died ({cause}){detail}, and with it its part of the replay. See its output "
            "in logs/ in the run folder; murmurate resume has the replay of the last checkpoint."
        )

    def check(self) -> None:
        """Raise RunFailed if the shard has died or counts as hung."""
        cause = self.watched.cause_of_death(self.counts.beats)
        if cause is not None:
            with contextlib.suppress(EOFError, OSError):
                while self._control is not None and self._control.poll():
                    self._handle_message(*self._control.recv())
            raise self._failure(cause)

    def receive_messages(self) -> None:
        """Read all messages that the shard has sent."""
        while self._received_messages < self.counts.messages:
            self._next_message()

    def _next_message(self) -> str:
        assert self._control is not None
        with self._raising_run_failed():
            kind, content = self._control.recv()
        self._received_messages += 1
        self._handle_message(kind, content)
        return str(kind)

    def _handle_message(self, kind: str, content: Any) -> None:
        if kind == "episodes":
            self.episodes += content
        elif kind == "listening":
            self.address = dataclasses.replace(self.address, port=content)
            self.is_listening = True
        elif kind == "failed":
            raise self._failure("an error", content)

    def send(self, command: str) -> None:
        assert self._control is not None
        with self._raising_run_failed():
            self._control.send(command)

    def state(self) -> dict[str, Any]:
        """A copy of the shard's contents at one moment."""
        assert self._control is not None
        with self._raising_run_failed(), self.watched.killed_if_suspended():
            self.send("state")
            while self._next_message() != "state":
                pass
            state: dict[str, Any] = receive_state(self._control)
        return state

    def close(self) -> None:
        self.watched.kill()
        if self._control is not None:
            self._control.close()
        self._memory.close()


class SamplerProcess:
    """One sampler and its slots."""

    def __init__(self, layout: SlotLayout, rank: int, index: int, ready: int) -> None:
        self.watched = _Watched("sampler", f"{index} of replica {rank}")
        self._descriptor = memfd("murmurate")
        os.ftruncate(self._descriptor, layout.size_bytes)
        self.slots = BatchSlots.mapped(self._descriptor, layout)
        self._wake_eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        stream = Stream(rank, index, secrets.token_hex(8))
        self._settings = SamplerSettings(stream, layout, self._descriptor, self._wake_eventfd, ready)

    def start(self, addresses: dict[int, ShardAddress]) -> None:
        settings = self._settings
        process = subprocess.Popen(  # rather than a fork of the fork server, which has imported torch
            [sys.executable, "-m", "murmurate.sources.service_sampler"],
            stdin=subprocess.PIPE,
            pass_fds=(settings.memory, settings.wake, settings.ready),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.watched.note_start(process, self.slots.beats)
        self._write(settings)
        self.send(addresses)

    def send(self, addresses: dict[int, ShardAddress]) -> None:
        self._write(addresses)

    def _write(self, content: Any) -> None:
        process = self.watched.process
        with contextlib.suppress(BrokenPipeError):  # the next check finds the process dead
            if process is not None and process.stdin is not None:
                process.stdin.write(pickle.dumps(content))
                process.stdin.flush()  # stdin stays open: the process exits when it is closed

    def wake(self) -> None:
        os.eventfd_write(self._wake_eventfd, 1)

    def close(self) -> None:
        self.watched.kill()
        os.close(self._wake_eventfd)
        os.close(self._descriptor)


class ServiceProcesses:
    """A learner's shards and samplers. A shard that dies ends the run; a sampler is started again.

    shards: settings of each shard, without descriptors. rings: for each shard, the descriptors of its actors'
    rings.
    """

    def __init__(
        self,
        rank: int,
        shards: Sequence[ShardSettings],
        rings: Sequence[Sequence[int]],
        samplers: int,
        layout: SlotLayout,
    ) -> None:
        self.shards = [ShardProcess(settings, rank, index) for index, settings in enumerate(shards)]
        self._rings = rings
        self._ready_eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._ready_eventfd, select.POLLIN)
        self.samplers = [SamplerProcess(layout, rank, k, self._ready_eventfd) for k in range(samplers)]
        self.addresses: dict[int, ShardAddress] = {}  # of all learners' shards by number, once known
        self.events: list[tuple[str, str]] = []
        self._checked_at = 0.0
        self.has_started = False

    @property
    def reported_steps(self) -> int:
        """Env steps of the learner's actors that were reported so far."""
        return sum(shard.reported_steps for shard in self.shards)

    def start(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Start the shards. states: the saved contents of each shard, or None."""
        self.has_started = True
        for shard, rings, state in zip(self.shards, self._rings, states, strict=True):
            shard.start(rings, state)
            self._note(shard.watched, "began")

    def wait_ready(self, seconds: float) -> None:
        """Wait until a sampler has a batch ready, at most ``seconds``."""
        if self._poll.poll(1_000 * seconds):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._ready_eventfd)

    def send(self, addresses: dict[int, ShardAddress]) -> None:
        """Send the samplers the addresses of new shards, by number; the first call starts the samplers."""
        is_first = not self.addresses
        self.addresses |= addresses
        for sampler in self.samplers:
            if is_first:
                sampler.start(self.addresses)
                self._note(sampler.watched, "began")
            else:
                sampler.send(addresses)

    def check(self) -> bool:
        """Check all processes, unless the last check was a short time ago; returns whether they were checked.

        Raises RunFailed for a shard that has died, and for a sampler that dies again and again.
        """
        now = time.monotonic()
        if now < self._checked_at + _CHECK_SECONDS:
            return False
        self._checked_at = now
        for shard in self.shards:
            shard.check()
        for sampler in self.samplers:
            watched = sampler.watched
            cause = watched.cause_of_death(sampler.slots.beats)
            if cause is None:
                continue
            watched.kill()
            if watched.silent_deaths >= _MAX_DEATHS:
                raise RunFailed(
                    f"{watched.name} died {_MAX_DEATHS} times in a row ({cause}). See its output in logs/ in "
                    "the run folder."
                )
            self._note(watched, "died", f" ({cause}) and is started again")
            sampler.start(self.addresses)
            self._note(watched, "began")
        return True

    def _note(self, watched: _Watched, verb: str, detail: str = "") -> None:
        """Append an event. verb: "began" or "died"."""
        pid = watched.process.pid if watched.process is not None else 0
        self.events.append((f"{watched.kind} {verb}", f"{watched.name} {verb}{detail or f', process {pid}'}"))

    @property
    def deaths(self) -> int:
        """Number of deaths of samplers."""
        return sum(max(0, sampler.watched.starts - 1) for sampler in self.samplers)

    def close(self) -> None:
        for sampler in self.samplers:
            sampler.close()
        for shard in self.shards:
            shard.close()
        os.close(self._ready_eventfd)
