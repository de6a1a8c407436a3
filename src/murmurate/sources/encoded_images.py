"""Mini-batches of images that are decoded while the learner learns."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from murmurate.datasets.image_files import ImageFiles, bad_image
from murmurate.datasets.image_set import ImageBatch
from murmurate.errors import RunFailed, printable
from murmurate.sources.examples import ExampleOrder
from murmurate.sources.image_processes import ImageProcesses
from murmurate.sources.image_worker import WorkerSettings, decode_part
from murmurate.sources.polling import Backoff
from murmurate.spec import Batch

_POLLS = 20  # polls between two calls of ``alive``
_LONGEST_SLEEP_SECONDS = 0.005  # short compared to the time that decoding a batch takes
_CRASH = "it makes the decoder crash"


class EncodedImageSource:
    """Mini-batches without end (a ``Source``), decoded by processes up to ``layout.slots - 1`` batches ahead.

    Images, and the random numbers drawn for them, do not depend on the number of processes. The memory of a
    batch is reused: its images are valid until the next batch is requested. With ``images.skip_bad`` an image
    that cannot be decoded is left out of its batch, which is then smaller.

    indices: for each example that ``order`` permutes, its number in ``images``. settings: with
    ``layout.workers`` = 0 the learner itself decodes. rank: rank of the learner, for messages.

    Requesting a batch raises RunFailed for an image that cannot be decoded (without ``skip_bad``), if no
    image of a whole pass can be, and if a process dies again and again.
    """

    exact = True

    def __init__(
        self,
        images: ImageFiles,
        indices: NDArray[np.int64],
        order: ExampleOrder,
        settings: WorkerSettings,
        rank: int,
    ) -> None:
        self.alive: Callable[[int], bool] = lambda played: False
        self._images, self._indices, self._order = images, indices, order
        # without processes, the learner itself decodes, as a single process would
        self._inline = not settings.layout.workers
        layout = replace(settings.layout, workers=max(settings.layout.workers, 1))
        self._settings, self._rank = replace(settings, layout=layout), rank
        self._processes: ImageProcesses | None = None
        self._taken = 0  # batches yielded so far
        self._state = order.state()  # state after the yielded batches; ``order`` itself is further ahead
        self._passes = order.passes
        # of each assigned batch: its image numbers, and the state and passes of ``order`` after it
        self._pending: deque[tuple[NDArray[np.int64], dict[str, Any], float]] = deque()
        self._skipped: Counter[str] = Counter()
        self._events: list[tuple[str, str]] = []
        self._backoff = Backoff(_LONGEST_SLEEP_SECONDS)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        processes = self._opened_processes()
        layout = processes.layout
        first = self._taken
        while (self._taken - first) * layout.batch <= len(self._indices):
            while processes.memory.assigned < self._taken + layout.slots:
                self._assign(processes)
            if not self._wait_until_decoded(processes):
                return Batch(None)
            batch = self._next_batch(processes)
            if len(batch):
                return Batch(batch, env_steps=len(batch))
            if self.alive(0):  # a whole pass may take long
                return Batch(None)
        causes = ", ".join(f"{count:,} x {cause}" for cause, count in self._skipped.items())
        raise RunFailed(f"No image of a whole pass could be decoded ({causes}). Check the files.")

    def _opened_processes(self) -> ImageProcesses:
        if self._processes is None:
            self._processes = ImageProcesses(self._settings, self._rank)
            if not self._inline:
                self._processes.start()
        return self._processes

    def _assign(self, processes: ImageProcesses) -> None:
        numbers, passes = self._order.take(processes.layout.batch)
        chosen = self._indices[numbers]
        place = self._images.encoded.place
        processes.memory.assign(passes, numbers, [place(number) for number in chosen.tolist()])
        self._pending.append((chosen, self._order.state(), self._order.passes))

    def _wait_until_decoded(self, processes: ImageProcesses) -> bool:
        """Wait until the next batch is decoded; returns False if the training loop requests a stop."""
        if self._inline:
            decode_part(processes.memory, self._taken % processes.layout.slots, self._settings)
            processes.memory.finish(0)
        polls = 0
        while not processes.memory.is_decoded(self._taken):
            blamed_image = processes.check()
            if blamed_image is not None:
                processes.leave_out(*blamed_image, "damaged image", _CRASH)
            self._events += processes.taken_events()
            polls += 1
            if polls % _POLLS == 0 and self.alive(0):
                return False
            self._backoff.sleep()
        self._backoff.reset()
        return True

    def _next_batch(self, processes: ImageProcesses) -> ImageBatch:
        slot = self._taken % processes.layout.slots
        chosen, self._state, self._passes = self._pending.popleft()
        self._taken += 1
        pixels, results = processes.memory.pixels[slot], processes.memory.results[slot]
        bad = results["cause"] != b""
        if bad.any():
            for position in np.flatnonzero(bad).tolist():
                self._leave_out(int(chosen[position]), results[position])
            pixels, chosen = pixels[~bad], chosen[~bad]
        labels = self._images.labels[chosen]
        return ImageBatch(torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.from_numpy(labels))

    def _leave_out(self, number: int, result: Any) -> None:
        title = self._images.encoded.title(number)
        cause, detail = (result[name].decode("utf-8", "backslashreplace") for name in ("cause", "detail"))
        if not self._images.skip_bad:
            raise RunFailed(bad_image(title, detail))
        if not self._skipped[cause]:  # only the first image of each cause is reported
            self._events.append(("skipped", f"{printable(title)}: {detail}; it is left out"))
        self._skipped[cause] += 1

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that decode."""
        return [] if self._processes is None else self._processes.pids

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"passes": self._passes}
        if self._skipped:
            fields["skipped_images"] = self._skipped.total()
        if self._processes is not None and self._processes.deaths:
            fields["decoder_deaths"] = self._processes.deaths
        return fields

    def events(self) -> Sequence[tuple[str, str]]:
        events, self._events = self._events, []
        return events

    def state(self) -> dict[str, Any]:
        return {**self._state, "skipped": dict(self._skipped)}

    def load(self, state: dict[str, Any]) -> None:
        self._stop()
        self._order.load(state)
        self._skipped = Counter(state.get("skipped", {}))
        self._note_order()

    def fresh_start(self, batches: int) -> None:
        """Go on where this replica would be after ``batches`` batches: a peer's state is of no use here,
        because it covers other images."""
        self._stop()
        self._order.skip_to(batches * self._settings.layout.batch)
        self._note_order()

    def _note_order(self) -> None:
        self._state, self._passes = self._order.state(), self._order.passes

    def _stop(self) -> None:
        """End the processes, and drop the batches that were decoded ahead."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None
        self._pending.clear()
        self._taken = 0

    def close(self) -> None:
        self._stop()
