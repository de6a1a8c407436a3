"""Starts and watches the processes that decode a learner's images, and restarts those that die or hang.

A restarted process begins with the mini-batch in which its predecessor died. What it writes depends on the
tasks alone, so nothing is lost and nothing changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
import time

from murmurate.errors import RunFailed
from murmurate.fabric.processes.module_process import end_process
from murmurate.fabric.processes.process_handle import is_stopped
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.sources.image_memory import BatchMemory, MemoryLayout
from murmurate.sources.image_worker import WorkerSettings

_MODULE = "murmurate.sources.image_worker"
# By default glibc returns the memory of each decoded image to the operating system, and gets it back, zeroed
# page by page, for the next image: a quarter of the CPU time. Blocks above 32 MB are still returned.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**26),
    "OPENCV_LOG_LEVEL": "SILENT",
}
_CHECK_SECONDS = 0.2  # between two checks of the processes
_SILENCE_SECONDS = 60.0  # a process that decodes nothing for so long counts as hung
_STOPPED_SECONDS = 10.0  # the limit while the operating system reports the process as stopped
_STARTUP_SECONDS = 300.0  # the limit before the first image
_MAX_DEATHS = 5  # the run fails after so many deaths in a row, without a batch done in between
_DEATHS_TO_BLAME = 2  # an image at which a process died so many times in a row counts as the cause


@dataclasses.dataclass
class _Decoder:
    """One decoding process. progress: (batches done, position of the current image) at the last check."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    progress: tuple[int, int | None] = (0, None)
    silent_seconds: float = 0.0
    deaths: int = 0  # deaths in a row, without a batch done in between
    died_at: tuple[int, int | None] = (0, None)  # ``progress`` at the last death
    repeats: int = 0  # deaths in a row at ``died_at``
    has_worked: bool = False  # whether it made progress since it was last started

    @property
    def is_hung(self) -> bool:
        if self.silent_seconds > _STOPPED_SECONDS and self.process and is_stopped(self.process.pid):
            return True
        return self.silent_seconds > (_SILENCE_SECONDS if self.has_worked else _STARTUP_SECONDS)

    def kill(self) -> None:
        if self.process is not None:
            end_process(self.process)
            self.process = None


class ImageProcesses:
    """The memory of a learner's mini-batches, and ``layout.workers`` processes that decode into it.

    settings: settings of the processes; ``worker`` and ``memory`` are set here. rank: rank of the learner,
    for messages.
    """

    def __init__(self, settings: WorkerSettings, rank: int) -> None:
        self._settings, self._rank = settings, rank
        self._file = SharedMemoryFile.create()
        os.ftruncate(self._file.descriptor, settings.layout.size_bytes)
        self.memory = BatchMemory(self._file.descriptor, settings.layout)
        self._decoders = [_Decoder(number) for number in range(settings.layout.workers)]
        self.events: list[tuple[str, str]] = []
        self._checked_at = time.monotonic()

    @property
    def layout(self) -> MemoryLayout:
        return self._settings.layout

    @property
    def pids(self) -> list[int]:
        return [decoder.process.pid for decoder in self._decoders if decoder.process is not None]

    @property
    def deaths(self) -> int:
        return sum(max(decoder.starts - 1, 0) for decoder in self._decoders)

    def taken_events(self) -> list[tuple[str, str]]:
        """Events since the last call: (kind, message)."""
        events, self.events = self.events, []
        return events

    def start(self) -> None:
        for decoder in self._decoders:
            self._spawn(decoder)

    def check(self) -> tuple[int, int] | None:
        """Restart each process that has died or hangs. Returns (slot, position) of an image at which
        processes die again and again: the caller must ``leave_out`` the image, or end the run.

        Raises RunFailed for a process that dies again and again without such an image.
        """
        elapsed = time.monotonic() - self._checked_at
        if elapsed < _CHECK_SECONDS:
            return None
        self._checked_at += elapsed
        for decoder in self._decoders:
            blamed_image = self._check(decoder, min(elapsed, 2 * _CHECK_SECONDS))
            if blamed_image is not None:
                return blamed_image
        return None

    def _check(self, decoder: _Decoder, elapsed: float) -> tuple[int, int] | None:
        memory, number = self.memory, decoder.number
        progress = (memory.done(number), memory.current(number))
        if progress != decoder.progress:
            if progress[0] != decoder.progress[0]:
                decoder.deaths = 0
            decoder.progress, decoder.silent_seconds, decoder.has_worked = progress, 0.0, True
        elif memory.assigned > progress[0]:  # the process has something to do
            decoder.silent_seconds += elapsed
        code = None if decoder.process is None else decoder.process.poll()
        if code is not None:
            cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        elif decoder.is_hung:
            cause = f"hung: no image for {decoder.silent_seconds:.0f} s"
        else:
            return None
        decoder.kill()
        decoder.deaths += 1
        decoder.repeats = decoder.repeats + 1 if progress == decoder.died_at else 1
        decoder.died_at = progress
        name = f"decoding process {number} of replica {self._rank}"
        if decoder.deaths >= _MAX_DEATHS:
            raise RunFailed(
                f"{name} died {_MAX_DEATHS} times in a row ({cause}). See its output in logs/ in the run "
                "folder."
            )
        self.events.append(("decoder died", f"{name} died ({cause}) and is started again"))
        batches, position = progress
        self.memory.begin(number, -1)  # no image, until the next process begins one
        self._spawn(decoder)
        if position is not None and decoder.repeats >= _DEATHS_TO_BLAME:
            decoder.deaths = decoder.repeats = 0
            return batches % self.layout.slots, position
        return None

    def leave_out(self, slot: int, position: int, cause: str, detail: str) -> None:
        """Tell the processes to skip an image. cause: the kind of fault, which is counted; detail: for the
        message."""
        results = self.memory.results[slot]
        results["cause"][position], results["detail"][position] = cause.encode(), detail.encode()
        results["left_out"][position] = True

    def _spawn(self, decoder: _Decoder) -> None:
        descriptor = self._file.descriptor
        settings = dataclasses.replace(self._settings, memory=descriptor, worker=decoder.number)
        decoder.process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            pass_fds=(descriptor,),
            env={**_ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": "1"},
        )
        decoder.starts += 1
        decoder.has_worked, decoder.silent_seconds = False, 0.0
        if decoder.process.stdin is None:
            raise RuntimeError("the decoding process has no stdin")
        with contextlib.suppress(BrokenPipeError):  # the next check finds the process dead
            decoder.process.stdin.write(pickle.dumps(settings))
            decoder.process.stdin.flush()  # stdin stays open: the process exits when it is closed

    def close(self) -> None:
        for decoder in self._decoders:
            decoder.kill()
        self._file.close()
