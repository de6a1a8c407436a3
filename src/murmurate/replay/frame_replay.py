"""A replay of transitions whose observations are stacks of a simulator's latest images."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmurate.replay.async_copy import AsyncCopy
from murmurate.replay.checks import check_steps
from murmurate.replay.frames import Frames
from murmurate.replay.interface import Sample, Selection, Steps
from murmurate.replay.memory import Allocate, private
from murmurate.replay.priorities import SlotSampler
from murmurate.replay.returns import InitialErrors, Integers, NStepReturns, push
from murmurate.replay.rows import (
    RECORDED,
    Column,
    RowStore,
    numbers_as_bytes,
    pop_behaviour,
    recorded_columns,
)
from murmurate.replay.tree import Draw
from murmurate.spec import Shapes

DISCRETE = Column((), torch.int64)  # a discrete action, stored as its index
# the lower bits of a key are the frame's number in its stream, the others the stream's number
_FRAME_NUMBER_BITS = 40


class FrameReplay:
    """See ``Replay``; each image is stored once. A key combines the number of a stream (simulator) with the
    number, in this stream, of the newest frame of a transition's observation.

    sampler: draws from simulators x length slots; each simulator has its own ring. shape: shape of an image,
    [H, W] or [C, H, W]. action: shape and dtype of an action. behaviour: shapes of the tensors stored with
    each action, by name.
    device: see ``Frames``; a batch has its images there, and everything else on the host.
    """

    def __init__(
        self,
        sampler: SlotSampler,
        shape: tuple[int, ...],
        *,
        simulators: int = 1,
        stack: int = 4,
        steps: int = 1,
        discount: float = 0.99,
        allocate: Allocate = private,
        action: Column = DISCRETE,
        behaviour: Shapes | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._behaviour = dict(behaviour or {})
        length = sampler.capacity // simulators
        if length * simulators != sampler.capacity:
            raise ValueError(
                f"{sampler.capacity} slots do not divide among {simulators} simulators: "
                f"use {length * simulators}"
            )
        self.sampler, self.steps, self.inserted = sampler, steps, 0
        self.frames = Frames(
            length,
            shape,
            streams=simulators,
            stack=stack,
            steps=steps,
            allocate=allocate,
            device=device,
        )
        scalar = Column((), torch.float32)
        self._stack = (stack, *shape)
        channels = shape[:-2]  # empty if an image is [H, W]
        self._observation = Column((stack * math.prod(channels), *shape[-2:]), torch.uint8)
        self._action = action
        columns = {"action": action, "reward": scalar, "discount": scalar}
        columns |= recorded_columns(self._behaviour)
        self.rows = RowStore(sampler.capacity, columns, allocate)
        # k, the number of steps from s to s': less than n for the last steps before a truncation
        self._lengths = np.full(sampler.capacity, steps, np.int16)
        self._returns = NStepReturns(simulators, steps, discount)
        self._errors = InitialErrors(simulators, steps)
        self._heads = np.zeros(simulators, np.int64)  # frames appended so far
        self._first = np.ones(simulators, np.bool_)  # whether the next step is the first of an episode
        # of each simulator's last n steps, newest first: the number of the step's newest frame, its action
        self._frame_numbers = np.zeros((steps, simulators), np.int64)
        shape = (steps, simulators, *action.shape)
        self._actions = torch.zeros(shape, dtype=action.dtype, device="cpu").numpy()
        self._recorded = {
            RECORDED + name: np.zeros((steps, simulators, *shape), np.float32)
            for name, shape in self._behaviour.items()
        }

    def __len__(self) -> int:
        return self.sampler.filled

    @property
    def full(self) -> bool:
        # a step may append the first stack of an episode, and n frames at an episode's end
        return bool((self._heads + self.frames.window > self.frames.length).any())

    def observe(self, first_simulator: int, steps: Steps) -> int:
        """Observations are [b, stack * C, H, W] uint8, the newest image last."""
        check_steps(
            steps, first_simulator, len(self._heads), self._observation, self._action, self._behaviour
        )
        count, length = steps.reward.shape[0], self.frames.length
        stop = first_simulator + count
        stepping, streams = slice(first_simulator, stop), np.arange(first_simulator, stop)
        terminated, truncated = steps.terminated.numpy(), steps.truncated.numpy()
        begins = self._first[stepping].copy()
        if begins.any():
            for image in self._images(steps.observation[torch.from_numpy(begins)]).unbind(1):
                self._append(streams[begins], image)
        push(self._frame_numbers[:, stepping], self._heads[stepping] - 1)
        push(self._actions[:, stepping], steps.action.numpy())
        for name, history in self._recorded.items():
            push(history[:, stepping], steps.behaviour[name.removeprefix(RECORDED)].detach().numpy())
        self._errors.step(first_simulator, count, steps.action_value)
        completed = self._returns.step(first_simulator, steps.reward.numpy(), terminated, truncated)
        image = self._images(steps.next_observation)[:, -1]
        self._append(streams, image)
        # after a termination s' is not used (discount 0), but a window still has n frames after s
        if self.steps > 1 and terminated.any():
            ended = torch.from_numpy(terminated)
            for _ in range(self.steps - 1):
                self._append(streams[terminated], image[ended])
        self._first[stepping] = terminated | truncated
        if not len(completed):
            return 0
        first_step = (completed.age - 1, completed.simulator)
        slots = completed.simulator * length + self._frame_numbers[first_step] % length
        values = {
            "action": self.rows.as_bytes("action", torch.from_numpy(self._actions[first_step])),
            "reward": numbers_as_bytes(completed.reward),
            "discount": numbers_as_bytes(completed.discount),
        }
        for name, history in self._recorded.items():
            values[name] = self.rows.as_bytes(name, torch.from_numpy(history[first_step]))
        self.rows.put(slots, values)
        # after a termination s' is not used; the length is then n, for which s' needs no second copy
        self._lengths[slots] = np.where(
            terminated[completed.simulator - first_simulator], self.steps, completed.age
        )
        errors = self._errors.errors(completed, first_simulator, steps.next_value)
        self.sampler.put(torch.from_numpy(slots), errors)
        self.inserted += len(slots)
        return len(slots)

    def _images(self, observation: Tensor) -> Tensor:
        """The images of an observation: [b, stack, (C,) H, W]."""
        return observation.reshape(len(observation), *self._stack)

    def _append(self, streams: Integers, images: Tensor) -> None:
        """Append one frame to each of ``streams``, and remove the transitions that used the overwritten
        frame from the sampler."""
        length, heads = self.frames.length, self._heads[streams]
        overwrites = heads >= length
        if overwrites.any():
            # the window that begins at the overwritten frame belongs to the transition stack - 1 slots later
            slot = (heads[overwrites] + self.frames.stack - 1) % length
            self.sampler.remove(torch.from_numpy(streams[overwrites] * length + slot))
        self.frames.append(streams, heads, images)
        self._heads[streams] = heads + 1

    def restart(self, first_simulator: int, count: int) -> None:
        self._returns.forget(first_simulator, count)
        self._first[first_simulator : first_simulator + count] = True

    def choose(self, count: int, beta: float, out: Draw | None = None) -> Selection:
        draw = self.sampler.draw(count, beta, out)
        length = self.frames.length
        stream, position = np.divmod(draw.indices.numpy(), length)
        newest = self._heads[stream] - 1
        number = newest - (newest - position) % length
        return Selection(torch.from_numpy(stream << _FRAME_NUMBER_BITS | number), draw)

    def buffers(self, count: int, pinned: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        return self.frames.buffers(count, pinned), self.rows.buffers(count, pinned)

    def gather(
        self,
        selection: Selection,
        buffers: tuple[Tensor, dict[str, Tensor]] | None = None,
        copier: AsyncCopy | None = None,
    ) -> Sample:
        images, values = (None, None) if buffers is None else buffers
        slots = selection.draw.indices
        lengths = self._lengths[slots.numpy()] if self.steps > 1 else None
        window = self.frames.read(slots, images, lengths, copier)
        read = dict(self.rows.read(slots, values, copier))
        behaviour = pop_behaviour(read) if self._behaviour else {}
        return Sample(
            selection.keys,
            selection.draw.weights,
            observation=window.observation,
            next_observation=window.next_observation,
            **read,
            behaviour=behaviour,
        )

    def write(self, selection: Selection, columns: dict[str, Tensor]) -> None:
        sample = self.gather(selection)
        values = vars(sample) | {RECORDED + name: x for name, x in sample.behaviour.items()}
        for name, column in columns.items():
            column.copy_(values[name])

    def sample(self, count: int, beta: float) -> Sample:
        return self.gather(self.choose(count, beta))

    def update(self, keys: Tensor, error: Tensor) -> None:
        stream, number = np.divmod(keys.cpu().numpy(), 1 << _FRAME_NUMBER_BITS)
        heads = self._heads[stream]
        oldest = heads - self.frames.length + self.frames.stack - 1
        present = (number >= oldest) & (number < heads)
        slots = torch.from_numpy(stream * self.frames.length + number % self.frames.length)
        if not present.all():
            slots, error = slots[torch.from_numpy(present)], error[torch.from_numpy(present)]
        self.sampler.update(slots, error)

    def state(self) -> dict[str, Any]:
        recorded = {name: torch.from_numpy(history) for name, history in self._recorded.items()}
        return {
            **({"recorded": recorded} if recorded else {}),
            "heads": torch.from_numpy(self._heads),
            "inserted": self.inserted,
            "frames": self.frames.save(self._heads.tolist()),
            "rows": self.rows.save(self.rows.capacity),
            "lengths": torch.from_numpy(self._lengths),
            "chances": self.sampler.state(),
            "returns": self._returns.state(),
            "first": torch.from_numpy(self._first),
            "seen": torch.from_numpy(self._frame_numbers),
            "done": torch.from_numpy(self._actions),
        }

    def load(self, state: dict[str, Any]) -> None:
        self._heads[:] = state["heads"].numpy()
        self.inserted = int(state["inserted"])
        self.frames.load(state["frames"])
        self.rows.load(state["rows"])
        if "lengths" in state:  # in older checkpoints all transitions have n steps
            self._lengths[:] = state["lengths"].numpy()
        else:
            self._lengths[:] = self.steps
        self.sampler.load(state["chances"])
        self._returns.load(state["returns"])
        self._first[:] = state["first"].numpy()
        self._frame_numbers[:] = state["seen"].numpy()
        self._actions[:] = state["done"].numpy()
        for name, history in self._recorded.items():
            history[:] = state["recorded"][name].numpy()
