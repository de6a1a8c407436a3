"""A replay: transitions in a ring, and batches of them drawn by their priorities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from murmurate.replay.adder import Adder, Transition
from murmurate.replay.frames import Frames
from murmurate.replay.memory import Take, private
from murmurate.replay.priorities import Chances
from murmurate.replay.rows import Column, Rows


@dataclass
class Sample:
    """A batch of B transitions. keys: [B] int64, to be handed back with their errors. weights: [B] float32.

    reward: [B], n-step returns. discount: [B], of what follows; 0 after a termination.
    """

    keys: Tensor
    weights: Tensor
    observation: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    next_observation: Tensor


class Ring:
    """How many transitions one ring of ``length`` slots has had. A key is a transition's number: it tells of
    a late answer whether the transition it is about is still there."""

    def __init__(self, length: int) -> None:
        self.length, self.head = length, 0

    def slots(self, keys: Tensor) -> Tensor:
        return keys % self.length

    def keys(self, slots: Tensor) -> Tensor:
        """The newest number that lies at each slot."""
        return self.head - 1 - (self.head - 1 - slots) % self.length

    def present(self, keys: Tensor) -> Tensor:
        return (keys < self.head) & (keys >= self.head - self.length)


class RowReplay:
    """Transitions whose observations are small vectors.

    chances: over ``capacity`` slots. steps, discount: of the returns.
    """

    def __init__(
        self,
        chances: Chances,
        observation: Column,
        action: Column,
        *,
        steps: int = 1,
        discount: float = 0.99,
        simulators: int = 1,
        take: Take = private,
    ) -> None:
        one = Column((), torch.float32)
        columns = {
            "observation": observation,
            "next_observation": observation,
            "action": action,
            "reward": one,
            "discount": one,
        }
        self.chances, self.ring = chances, Ring(chances.capacity)
        self.rows = Rows(chances.capacity, columns, take)
        self._adders = [Adder(steps, discount) for _ in range(simulators)]

    def __len__(self) -> int:
        return self.chances.filled

    @property
    def inserted(self) -> int:
        """Transitions so far, those that were overwritten too."""
        return self.ring.head

    def add(self, simulator: int, *step: Any, **named: Any) -> int:
        """One step of a simulator (see ``Adder.add``); returns how many transitions it completed."""
        return self.insert(self._adders[simulator].add(*step, **named))

    def insert(self, transitions: list[Transition], error: Tensor | None = None) -> int:
        """error: [B], of their first priorities; see ``Chances.put``."""
        if not transitions:
            return 0
        count = len(transitions)
        values = {
            "observation": torch.stack([t.observation for t in transitions]),
            "next_observation": torch.stack([t.next_observation for t in transitions]),
            "action": torch.stack([t.action for t in transitions]),
            "reward": torch.tensor([t.reward for t in transitions]),
            "discount": torch.tensor([t.discount for t in transitions]),
        }
        return self.write(values, count, error)

    def write(self, values: Mapping[str, Tensor], count: int, error: Tensor | None = None) -> int:
        """``count`` transitions at once: [count, ...] of each column."""
        slots = self.ring.slots(torch.arange(self.ring.head, self.ring.head + count))
        self.rows.write(slots, values)
        self.ring.head += count
        self.chances.put(slots, error)
        return count

    def sample(self, count: int, beta: float) -> Sample:
        draw = self.chances.draw(count, beta)
        return Sample(self.ring.keys(draw.indices), draw.weights, **self.rows.read(draw.indices))

    def update(self, keys: Tensor, error: Tensor) -> None:
        """New errors of what was drawn; of what has been overwritten meanwhile they are dropped."""
        here = self.ring.present(keys)
        self.chances.update(self.ring.slots(keys[here]), error[here])

    def state(self) -> dict[str, Any]:
        kept = min(self.ring.head, self.ring.length)
        return {"head": self.ring.head, "rows": self.rows.save(kept), "chances": self.chances.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Returns that were open when it was saved begin anew."""
        self.ring.head = int(state["head"])
        self.rows.load(state["rows"])
        self.chances.load(state["chances"])
        for adder in self._adders:
            adder.forget()


class FrameReplay:
    """Transitions whose observations are the last ``stack`` images; each image is kept once.

    chances: over simulators x length slots; each simulator has a ring of its own.
    Differs from ``RowReplay``: the last n - 1 steps before an episode is cut off (not: terminated) are left
    out, as s and s' of fewer than n steps do not fit one window.
    """

    def __init__(
        self,
        chances: Chances,
        shape: tuple[int, ...],
        *,
        simulators: int,
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
        self.chances, self.steps = chances, steps
        self.frames = Frames(length, shape, streams=simulators, stack=stack, steps=steps, take=take)
        one = Column((), torch.float32)
        columns = {"action": Column((), torch.int64), "reward": one, "discount": one}
        self.rows = Rows(chances.capacity, columns, take)
        self.rings = [Ring(length) for _ in range(simulators)]
        self._adders = [Adder(steps, discount) for _ in range(simulators)]
        self._first = [True] * simulators
        self.inserted = 0

    def __len__(self) -> int:
        return self.chances.filled

    def add(
        self,
        simulator: int,
        observation: Tensor,
        action: Tensor,
        reward: float,
        next_observation: Tensor,
        terminated: bool,
        truncated: bool,
        error: Tensor | None = None,
    ) -> int:
        """One step; observations are [stack, H, W] uint8, the newest image last. Returns as
        ``RowReplay.add``."""
        if self._first[simulator]:
            for frame in observation:
                self._append(simulator, frame)
            self._first[simulator] = False
        where = self.rings[simulator].head - 1  # of the observation's newest frame
        token = torch.tensor(where)
        done = self._adders[simulator].add(token, action, reward, token, terminated, truncated)
        # after a termination windows reach n frames further all the same; what lies there is not looked at
        for _ in range(self.steps if terminated else 1):
            self._append(simulator, next_observation[-1])
        self._first[simulator] = terminated or truncated
        kept = [t for t in done if t.discount == 0.0 or t.length == self.steps]
        if kept:
            self._put(simulator, kept, error)
        return len(kept)

    def _append(self, simulator: int, frame: Tensor) -> None:
        """One frame more; what needed the one that it overwrites can no longer be drawn."""
        ring = self.rings[simulator]
        at = ring.head % ring.length
        # transitions whose window begins at the overwritten frame lie stack - 1 further on
        stale = simulator * ring.length + (at + self.frames.stack - 1) % ring.length
        if ring.head >= ring.length:
            self.chances.take_out(torch.tensor([stale]))
        self.frames.append(simulator, ring.head, frame)
        ring.head += 1

    def _put(self, simulator: int, done: list[Transition], error: Tensor | None) -> None:
        ring = self.rings[simulator]
        slots = simulator * ring.length + torch.stack([t.observation for t in done]) % ring.length
        self.rows.write(
            slots,
            {
                "action": torch.stack([t.action for t in done]),
                "reward": torch.tensor([t.reward for t in done]),
                "discount": torch.tensor([t.discount for t in done]),
            },
        )
        self.chances.put(slots, error)
        self.inserted += len(done)

    def sample(self, count: int, beta: float) -> Sample:
        draw = self.chances.draw(count, beta)
        window = self.frames.read(draw.indices)
        values = self.rows.read(draw.indices)
        return Sample(
            self._keys(draw.indices),
            draw.weights,
            observation=window.observation,
            next_observation=window.next_observation,
            **values,
        )

    def _keys(self, slots: Tensor) -> Tensor:
        """The number of a frame in its stream, and the stream in the high bits."""
        length = self.frames.length
        stream = torch.div(slots, length, rounding_mode="floor")
        heads = torch.tensor([ring.head for ring in self.rings])[stream]
        return stream << 40 | (heads - 1 - (heads - 1 - slots % length) % length)

    def update(self, keys: Tensor, error: Tensor) -> None:
        """As ``RowReplay.update``."""
        stream, number = keys >> 40, keys & ((1 << 40) - 1)
        heads = torch.tensor([ring.head for ring in self.rings])[stream]
        oldest = heads - self.frames.length + self.frames.stack - 1
        here = (number >= oldest) & (number < heads)
        slots = stream[here] * self.frames.length + number[here] % self.frames.length
        self.chances.update(slots, error[here])

    def state(self) -> dict[str, Any]:
        return {
            "heads": [ring.head for ring in self.rings],
            "inserted": self.inserted,
            "frames": self.frames.save(),
            "rows": self.rows.save(self.rows.capacity),
            "chances": self.chances.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Episodes that were under way when it was saved begin anew."""
        for ring, head in zip(self.rings, state["heads"], strict=True):
            ring.head = int(head)
        self.inserted = int(state["inserted"])
        self.frames.load(state["frames"])
        self.rows.load(state["rows"])
        self.chances.load(state["chances"])
        self._first = [True] * len(self.rings)
        for adder in self._adders:
            adder.forget()
