"""A replay of transitions whose observations are small vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmurate.replay.async_copy import AsyncCopy
from murmurate.replay.checks import check_errors, check_steps
from murmurate.replay.interface import Sample, Selection, Steps
from murmurate.replay.memory import Allocate, private
from murmurate.replay.priorities import SlotSampler
from murmurate.replay.returns import InitialErrors, NStepReturns, push
from murmurate.replay.rows import (
    RECORDED,
    Bytes,
    Column,
    RowStore,
    numbers_as_bytes,
    pop_behaviour,
    recorded_columns,
)
from murmurate.replay.tree import Draw
from murmurate.spec import Shapes


class RowReplay:
    """See ``Replay``. A key is a transition's number in the order of insertion; by it ``update`` recognizes
    transitions that have been overwritten.

    sampler: draws from ``capacity`` slots. steps, discount: n and gamma of the n-step returns. behaviour:
    shapes of the tensors stored with each action, by name.
    """

    def __init__(
        self,
        sampler: SlotSampler,
        observation: Column,
        action: Column,
        *,
        steps: int = 1,
        discount: float = 0.99,
        simulators: int = 1,
        allocate: Allocate = private,
        behaviour: Shapes | None = None,
    ) -> None:
        self._behaviour = dict(behaviour or {})
        scalar = Column((), torch.float32)
        columns = {
            "observation": observation,
            "next_observation": observation,
            "action": action,
            "reward": scalar,
            "discount": scalar,
            **recorded_columns(self._behaviour),
        }
        self.sampler, self.simulators = sampler, simulators
        self.head = 0  # number of transitions inserted so far
        self._observation, self._action = observation, action
        self._most_completed = steps * simulators
        self.rows = RowStore(sampler.capacity, columns, allocate)
        self._returns = NStepReturns(simulators, steps, discount)
        self._errors = InitialErrors(simulators, steps)

        # the last n steps of each simulator, newest first; ``_step_bytes`` is the same memory as bytes
        def history_of(column: Column) -> Tensor:
            return torch.zeros(steps, simulators, *column.shape, dtype=column.dtype, device="cpu")

        self._observations, self._actions = history_of(observation), history_of(action)
        self._recorded = {n: history_of(column) for n, column in recorded_columns(self._behaviour).items()}
        self._step_bytes = {
            name: self.rows.as_bytes(name, history.flatten(0, 1)).reshape(steps, simulators, -1)
            for name, history in (
                ("observation", self._observations),
                ("action", self._actions),
                *self._recorded.items(),
            )
        }

    def __len__(self) -> int:
        return self.sampler.filled

    @property
    def inserted(self) -> int:
        return self.head

    @property
    def full(self) -> bool:
        # one step of all simulators completes at most n transitions of each
        return self.head + self._most_completed > self.sampler.capacity

    def observe(self, first_simulator: int, steps: Steps) -> int:
        check_steps(steps, first_simulator, self.simulators, self._observation, self._action, self._behaviour)
        count = steps.reward.shape[0]
        self._errors.step(first_simulator, count, steps.action_value)
        new = {"observation": steps.observation, "action": steps.action}
        new |= {RECORDED + name: steps.behaviour[name] for name in self._behaviour}
        for name, history in self._step_bytes.items():
            push(history[:, first_simulator : first_simulator + count], self.rows.as_bytes(name, new[name]))
        completed = self._returns.step(
            first_simulator, steps.reward.numpy(), steps.terminated.numpy(), steps.truncated.numpy()
        )
        if not len(completed):
            return 0
        first_step = (completed.age - 1, completed.simulator)
        values = {name: history[first_step] for name, history in self._step_bytes.items()}
        next_observation = self.rows.as_bytes("next_observation", steps.next_observation)
        values["next_observation"] = next_observation[completed.simulator - first_simulator]
        values["reward"] = numbers_as_bytes(completed.reward)
        values["discount"] = numbers_as_bytes(completed.discount)
        errors = self._errors.errors(completed, first_simulator, steps.next_value)
        return self._insert(values, len(completed), errors)

    def insert(self, values: Mapping[str, Tensor], count: int, error: Tensor | None = None) -> int:
        """Insert ``count`` transitions at once: values [count, ...] of each column. error: [count], for their
        initial priorities; see ``SlotSampler.put``.

        Raises ValueError for more than the capacity, for values of a wrong shape or dtype, and for errors
        that are not finite, before any change.
        """
        if count > self.sampler.capacity:
            raise ValueError(f"{count} transitions at once do not fit into {self.sampler.capacity} slots")
        return self._insert(self.rows.checked(values, count), count, error)

    def _insert(self, values: Mapping[str, Bytes], count: int, error: Tensor | None) -> int:
        """Insert checked values; errors are checked here, because their computation may overflow."""
        if error is not None:
            check_errors(error, count)
        start, capacity = self.head % self.sampler.capacity, self.sampler.capacity
        slots = np.arange(start, start + count)
        if start + count <= capacity:
            self.rows.put(slice(start, start + count), values)
        else:
            slots %= capacity
            self.rows.put(slots, values)
        self.head += count
        self.sampler.put(torch.from_numpy(slots), error)
        return count

    def restart(self, first_simulator: int, count: int) -> None:
        self._returns.forget(first_simulator, count)

    def choose(self, count: int, beta: float, out: Draw | None = None) -> Selection:
        draw = self.sampler.draw(count, beta, out)
        keys = self._keys(draw.indices)
        # keys are needed until the errors are known, and ``out`` may be reused before that
        return Selection(keys if out is None or keys is not draw.indices else keys.clone(), draw)

    def _keys(self, slots: Tensor) -> Tensor:
        """The number of the transition in each slot."""
        capacity = self.sampler.capacity
        if self.head <= capacity:
            return slots
        next_slot = self.head % capacity  # slots from this one on were written one round earlier
        numbers = slots.numpy() + (self.head - next_slot)
        numbers[slots.numpy() >= next_slot] -= capacity
        return torch.from_numpy(numbers)

    def buffers(self, count: int, pinned: bool = False) -> dict[str, Tensor]:
        return self.rows.buffers(count, pinned)

    def gather(
        self, selection: Selection, buffers: dict[str, Tensor] | None = None, copier: AsyncCopy | None = None
    ) -> Sample:
        values = self.rows.read(selection.draw.indices, buffers, copier)
        if not self._behaviour:
            return Sample(selection.keys, selection.draw.weights, **values)  # type: ignore[arg-type]
        values = dict(values)  # a copy: the dictionary of buffers is reused, and must keep its columns
        behaviour = pop_behaviour(values)
        return Sample(selection.keys, selection.draw.weights, **values, behaviour=behaviour)

    def write(self, selection: Selection, columns: dict[str, Tensor]) -> None:
        self.rows.read(selection.draw.indices, columns)

    def sample(self, count: int, beta: float) -> Sample:
        return self.gather(self.choose(count, beta))

    def update(self, keys: Tensor, error: Tensor) -> None:
        capacity = self.sampler.capacity
        keys = keys.cpu()
        numbers = keys.numpy()
        present = (numbers >= self.head - capacity) & (numbers < self.head)
        if np.count_nonzero(present) < len(numbers):
            keys, error = keys[torch.from_numpy(present)], error[torch.from_numpy(present)]
        self.sampler.update(keys if self.head <= capacity else keys % capacity, error)

    def state(self) -> dict[str, Any]:
        return {
            "head": self.head,
            "rows": self.rows.save(min(self.head, self.sampler.capacity)),
            "chances": self.sampler.state(),
            "returns": self._returns.state(),
            "seen": self._observations,
            "done": self._actions,
            **({"recorded": self._recorded} if self._recorded else {}),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.head = int(state["head"])
        self.rows.load(state["rows"])
        self.sampler.load(state["chances"])
        self._returns.load(state["returns"])
        self._observations.copy_(state["seen"])
        self._actions.copy_(state["done"])
        for name, history in self._recorded.items():
            history.copy_(state["recorded"][name])
