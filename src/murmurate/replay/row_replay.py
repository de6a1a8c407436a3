"""A replay of transitions whose observations are small vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmurate.replay._fits import check_errors, check_steps
from murmurate.replay.async_copy import Courier
from murmurate.replay.interface import Chosen, Sample, Steps
from murmurate.replay.memory import Take, private
from murmurate.replay.priorities import Chances
from murmurate.replay.returns import FirstErrors, NStepReturns, push
from murmurate.replay.rows import (
    RECORDED,
    Bytes,
    Column,
    Rows,
    behaviour_of,
    numbers_as_bytes,
    recorded_columns,
)
from murmurate.replay.sum_tree import Draw
from murmurate.spec import Shapes


class RowReplay:
    """See ``Replay``. A key is a transition's number: it tells of a late error whether the transition it is
    about is still there.

    chances: over ``capacity`` slots. steps, discount: of the returns. behaviour: shapes of what is recorded
    beside the action, by name.
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
        behaviour: Shapes | None = None,
    ) -> None:
        self._behaviour = dict(behaviour or {})
        one = Column((), torch.float32)
        columns = {
            "observation": observation,
            "next_observation": observation,
            "action": action,
            "reward": one,
            "discount": one,
            **recorded_columns(self._behaviour),
        }
        self.chances, self.head, self.simulators = chances, 0, simulators
        self._observation, self._action = observation, action
        self._most = steps * simulators
        self.rows = Rows(chances.capacity, columns, take)
        self._returns = NStepReturns(simulators, steps, discount)
        self._errors = FirstErrors(simulators, steps)
        # the last n steps of each simulator, newest first, and the same memory as the store takes it
        self._seen = torch.zeros(steps, simulators, *observation.shape, dtype=observation.dtype)
        self._done = torch.zeros(steps, simulators, *action.shape, dtype=action.dtype)
        self._recorded = {
            name: torch.zeros(steps, simulators, *column.shape)
            for name, column in recorded_columns(self._behaviour).items()
        }
        self._last = {
            name: self.rows.as_bytes(name, kept.flatten(0, 1)).reshape(steps, simulators, -1)
            for name, kept in (("observation", self._seen), ("action", self._done), *self._recorded.items())
        }

    def __len__(self) -> int:
        return self.chances.filled

    @property
    def inserted(self) -> int:
        return self.head

    @property
    def full(self) -> bool:
        # a step completes at most all that is open
        return self.head + self._most > self.chances.capacity

    def observe(self, low: int, steps: Steps) -> int:
        check_steps(steps, low, self.simulators, self._observation, self._action, self._behaviour)
        count = steps.reward.shape[0]
        self._errors.step(low, count, steps.taken)
        new = {"observation": steps.observation, "action": steps.action}
        new |= {RECORDED + name: steps.behaviour[name] for name in self._behaviour}
        for name, kept in self._last.items():
            push(kept[:, low : low + count], self.rows.as_bytes(name, new[name]))
        closed = self._returns.step(
            low, steps.reward.numpy(), steps.terminated.numpy(), steps.truncated.numpy()
        )
        if not len(closed):
            return 0
        of = (closed.age - 1, closed.simulator)
        values = {name: kept[of] for name, kept in self._last.items()}
        following = self.rows.as_bytes("next_observation", steps.next_observation)
        values["next_observation"] = following[closed.simulator - low]
        values["reward"] = numbers_as_bytes(closed.reward)
        values["discount"] = numbers_as_bytes(closed.discount)
        return self._insert(values, len(closed), self._errors.of(closed, low, steps.following))

    def insert(self, values: Mapping[str, Tensor], count: int, error: Tensor | None = None) -> int:
        """``count`` transitions at once: [count, ...] of each column. error: [count], of their first
        priorities; see ``Chances.put``.

        Raises ValueError for more than there is room for, and for values or errors that do not fit or are not
        finite; then nothing has changed.
        """
        if error is not None:
            check_errors(error, count)
        if count > self.chances.capacity:
            raise ValueError(f"{count} transitions at once do not fit into {self.chances.capacity} slots")
        return self._insert(self.rows.checked(values, count), count, error)

    def _insert(self, values: Mapping[str, Bytes], count: int, error: Tensor | None) -> int:
        """What is known to fit, but for errors that may have grown beyond all numbers."""
        if error is not None:
            check_errors(error, count)
        start, capacity = self.head % self.chances.capacity, self.chances.capacity
        slots = np.arange(start, start + count)
        if start + count <= capacity:
            self.rows.put(slice(start, start + count), values)
        else:
            slots %= capacity
            self.rows.put(slots, values)
        self.head += count
        self.chances.put(torch.from_numpy(slots), error)
        return count

    def restart(self, low: int, count: int) -> None:
        self._returns.forget(low, count)

    def choose(self, count: int, beta: float, out: Draw | None = None) -> Chosen:
        draw = self.chances.draw(count, beta, out)
        keys = self._keys(draw.indices)
        # errors may come late: keys outlive the memory that is used again
        return Chosen(keys if out is None or keys is not draw.indices else keys.clone(), draw)

    def _keys(self, slots: Tensor) -> Tensor:
        """The newest number that lies at each slot."""
        capacity = self.chances.capacity
        if self.head <= capacity:
            return slots
        place = self.head % capacity  # what lies from here on is a round older
        numbers = slots.numpy() + (self.head - place)
        numbers[slots.numpy() >= place] -= capacity
        return torch.from_numpy(numbers)

    def room(self, count: int, pinned: bool = False) -> dict[str, Tensor]:
        return self.rows.room(count, pinned)

    def gather(
        self, chosen: Chosen, room: dict[str, Tensor] | None = None, courier: Courier | None = None
    ) -> Sample:
        values = self.rows.read(chosen.draw.indices, room, courier)
        if not self._behaviour:
            return Sample(chosen.keys, chosen.draw.weights, **values)  # type: ignore[arg-type]
        values = dict(values)  # not to take columns out of memory that is used again
        behaviour = behaviour_of(values)
        return Sample(chosen.keys, chosen.draw.weights, **values, behaviour=behaviour)

    def sample(self, count: int, beta: float) -> Sample:
        return self.gather(self.choose(count, beta))

    def update(self, keys: Tensor, error: Tensor) -> None:
        capacity = self.chances.capacity
        keys = keys.cpu()
        numbers = keys.numpy()
        here = (numbers >= self.head - capacity) & (numbers < self.head)
        if np.count_nonzero(here) < len(numbers):
            keys, error = keys[torch.from_numpy(here)], error[torch.from_numpy(here)]
        self.chances.update(keys if self.head <= capacity else keys % capacity, error)

    def state(self) -> dict[str, Any]:
        return {
            "head": self.head,
            "rows": self.rows.save(min(self.head, self.chances.capacity)),
            "chances": self.chances.state(),
            "returns": self._returns.state(),
            "seen": self._seen,
            "done": self._done,
            **({"recorded": self._recorded} if self._recorded else {}),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.head = int(state["head"])
        self.rows.load(state["rows"])
        self.chances.load(state["chances"])
        self._returns.load(state["returns"])
        self._seen.copy_(state["seen"])
        self._done.copy_(state["done"])
        for name, kept in self._recorded.items():
            kept.copy_(state["recorded"][name])
