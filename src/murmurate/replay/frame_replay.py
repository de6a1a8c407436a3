"""A replay of transitions whose observations are the last few images of a simulator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from murmurate.replay._fits import check_steps
from murmurate.replay.frames import Frames
from murmurate.replay.interface import Chosen, Sample, Steps
from murmurate.replay.memory import Take, private
from murmurate.replay.priorities import Chances
from murmurate.replay.returns import FirstErrors, NStepReturns
from murmurate.replay.rows import Column, Rows

_STREAM_BITS = 40  # of a key: which stream lies above them, the number of a frame in it below


class FrameReplay:
    """See ``Replay``; each image is kept once. A key is the stream and the number of a transition's newest
    frame in it.

    chances: over simulators x length slots; each simulator has a ring of its own.
    """

    def __init__(
        self,
        chances: Chances,
        shape: tuple[int, ...],
        *,
        simulators: int = 1,
        stack: int = 4,
        steps: int = 1,
        discount: float = 0.99,
        take: Take = private,
    ) -> None:
        length = chances.capacity // simulators
        if length * simulators != chances.capacity:
            raise ValueError(
                f"{chances.capacity} slots do not divide among {simulators} simulators: "
                f"use {length * simulators}"
            )
        self.chances, self.steps, self.inserted = chances, steps, 0
        self.frames = Frames(length, shape, streams=simulators, stack=stack, steps=steps, take=take)
        one = Column((), torch.float32)
        self._observation = Column((stack, *shape), torch.uint8)
        self._action = Column((), torch.int64)
        columns = {"action": self._action, "reward": one, "discount": one}
        self.rows = Rows(chances.capacity, columns, take)
        # k, from s to s': less than n for the last steps before an episode is cut off
        self._lengths = torch.full((chances.capacity,), steps, dtype=torch.int16)
        self._returns = NStepReturns(simulators, steps, discount)
        self._errors = FirstErrors(simulators, steps)
        self._heads = torch.zeros(simulators, dtype=torch.int64)  # frames so far
        self._first = torch.ones(simulators, dtype=torch.bool)
        # of the last n steps of each simulator, newest first: the number of its newest frame, and the action
        self._seen = torch.zeros(steps, simulators, dtype=torch.int64)
        self._done = torch.zeros(steps, simulators, dtype=torch.int64)

    def __len__(self) -> int:
        return self.chances.filled

    @property
    def full(self) -> bool:
        # a step may bring the first stack of an episode, and n frames at its end
        return bool((self._heads + self.frames.window > self.frames.length).any())

    def observe(self, low: int, steps: Steps) -> int:
        """Observations are [b, stack, H, W] uint8, the newest image last."""
        check_steps(steps, low, len(self._heads), self._observation, self._action)
        streams = torch.arange(low, low + len(steps.reward))
        ended = steps.terminated | steps.truncated
        if (begins := self._first[streams]).any():
            for image in steps.observation[begins].unbind(1):
                self._append(streams[begins], image)
        for kept, new in ((self._seen, self._heads[streams] - 1), (self._done, steps.action)):
            for k in range(self.steps - 1, 0, -1):
                kept[k, streams] = kept[k - 1, streams]
            kept[0, streams] = new
        self._errors.step(low, len(streams), steps.taken)
        closed = self._returns.step(
            low, steps.reward.numpy(), steps.terminated.numpy(), steps.truncated.numpy()
        )
        image = steps.next_observation[:, -1]
        self._append(streams, image)
        # after a termination windows reach n frames further all the same; what lies there is not looked at
        if self.steps > 1 and steps.terminated.any():
            for _ in range(self.steps - 1):
                self._append(streams[steps.terminated], image[steps.terminated])
        self._first[streams] = ended
        if not len(closed):
            return 0
        stream, age = torch.from_numpy(closed.simulator), torch.from_numpy(closed.age)
        slots = stream * self.frames.length + self._seen[age - 1, stream] % self.frames.length
        values = {
            "action": self._done[age - 1, stream],
            "reward": torch.from_numpy(closed.reward),
            "discount": torch.from_numpy(closed.discount),
        }
        self.rows.write(slots, values)
        # nothing follows a termination: such windows are as long as any
        self._lengths[slots] = torch.where(steps.terminated[stream - low], self.steps, age).to(torch.int16)
        self.chances.put(slots, self._errors.of(closed, low, steps.following))
        self.inserted += len(slots)
        return len(slots)

    def _append(self, streams: Tensor, images: Tensor) -> None:
        """One frame more in each of ``streams``; what needed the one that it overwrites can no longer be
        drawn."""
        length, heads = self.frames.length, self._heads[streams]
        over = heads >= length
        if over.any():
            # transitions whose window begins at the overwritten frame lie stack - 1 further on
            at = (heads[over] + self.frames.stack - 1) % length
            self.chances.take_out(streams[over] * length + at)
        self.frames.append(streams, heads, images)
        self._heads[streams] = heads + 1

    def restart(self, low: int, count: int) -> None:
        self._returns.forget(low, count)
        self._first[low : low + count] = True

    def choose(self, count: int, beta: float) -> Chosen:
        draw = self.chances.draw(count, beta)
        length = self.frames.length
        stream = torch.div(draw.indices, length, rounding_mode="floor")
        newest = self._heads[stream] - 1
        number = newest - (newest - draw.indices % length) % length
        return Chosen(stream << _STREAM_BITS | number, draw)

    def room(self, count: int, pinned: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        return self.frames.room(count, pinned), self.rows.room(count, pinned)

    def gather(self, chosen: Chosen, room: tuple[Tensor, dict[str, Tensor]] | None = None) -> Sample:
        images, values = (None, None) if room is None else room
        slots = chosen.draw.indices
        window = self.frames.read(slots, images, self._lengths[slots] if self.steps > 1 else None)
        return Sample(
            chosen.keys,
            chosen.draw.weights,
            observation=window.observation,
            next_observation=window.next_observation,
            **self.rows.read(slots, values),
        )

    def sample(self, count: int, beta: float) -> Sample:
        return self.gather(self.choose(count, beta))

    def update(self, keys: Tensor, error: Tensor) -> None:
        stream, number = keys >> _STREAM_BITS, keys & ((1 << _STREAM_BITS) - 1)
        heads = self._heads[stream]
        oldest = heads - self.frames.length + self.frames.stack - 1
        here = (number >= oldest) & (number < heads)
        slots = stream[here] * self.frames.length + number[here] % self.frames.length
        self.chances.update(slots, error[here])

    def state(self) -> dict[str, Any]:
        return {
            "heads": self._heads,
            "inserted": self.inserted,
            "frames": self.frames.save(self._heads.tolist()),
            "rows": self.rows.save(self.rows.capacity),
            "lengths": self._lengths,
            "chances": self.chances.state(),
            "returns": self._returns.state(),
            "first": self._first,
            "seen": self._seen,
            "done": self._done,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._heads.copy_(state["heads"])
        self.inserted = int(state["inserted"])
        self.frames.load(state["frames"])
        self.rows.load(state["rows"])
        if "lengths" in state:  # older checkpoints hold nothing shorter than n
            self._lengths.copy_(state["lengths"])
        else:
            self._lengths.fill_(self.steps)
        self.chances.load(state["chances"])
        self._returns.load(state["returns"])
        self._first.copy_(state["first"])
        self._seen.copy_(state["seen"])
        self._done.copy_(state["done"])
