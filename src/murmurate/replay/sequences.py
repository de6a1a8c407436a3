"""The latest trajectories of many simulators, from which short sequences are drawn at random."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmurate.replay.checks import check_steps
from murmurate.replay.interface import Steps
from murmurate.replay.memory import array, private
from murmurate.replay.rows import RECORDED, Column, recorded_columns
from murmurate.spec import EnvSpec, SequenceSample, Shapes


class Trajectories:
    """A ring of the last ``length`` steps of each of ``simulators`` simulators.

    Each observation is stored once: the observation after a step is stored with the next step. Final
    observations of truncated episodes are stored outside the ring.
    """

    def __init__(self, spec: EnvSpec, length: int, simulators: int, behaviour: Shapes | None = None) -> None:
        if length < 1:
            raise ValueError(f"trajectories of {length} steps are empty; keep at least one step")
        self.length, self.simulators = length, simulators
        self._behaviour = dict(behaviour or {})
        self._observation = Column(spec.observation_shape, spec.observation_dtype)
        self._action = Column((), torch.int64) if spec.actions else Column(spec.action_shape, torch.float32)
        scalar, flag = Column((), torch.float32), Column((), torch.bool)
        columns = {"observation": self._observation, "action": self._action, "reward": scalar}
        columns |= {"terminated": flag, "truncated": flag}
        columns |= recorded_columns(self._behaviour)
        # one more slot: for the observation after the newest step
        self._slots = length + 1
        self._columns = {
            name: torch.from_numpy(
                array(
                    private,
                    name,
                    (self._slots * simulators, *column.shape),
                    torch.empty(0, dtype=column.dtype, device="cpu").numpy().dtype,
                )
            )
            for name, column in columns.items()
        }
        self._heads = np.zeros(simulators, np.int64)  # steps so far
        self._counts = np.zeros(simulators, np.int64)  # steps in the ring
        self._final: dict[int, Tensor] = {}  # final observations of truncated episodes, by row

    def __len__(self) -> int:
        """Steps in the ring, of all simulators."""
        return int(self._counts.sum())

    def observe(self, first_simulator: int, steps: Steps) -> None:
        """Add one step of the simulators from number ``first_simulator`` on.

        Raises ValueError for wrong shapes, dtypes or values (see ``checks``), before any change.
        """
        check_steps(steps, first_simulator, self.simulators, self._observation, self._action, self._behaviour)
        simulators = np.arange(first_simulator, first_simulator + len(steps.reward))
        rows = self._rows(self._heads[simulators], simulators)
        values = {"observation": steps.observation, "action": steps.action, "reward": steps.reward}
        values |= {"terminated": steps.terminated, "truncated": steps.truncated}
        values |= {RECORDED + name: steps.behaviour[name] for name in self._behaviour}
        for name, value in values.items():
            self._columns[name][rows] = value.detach().to("cpu")
        for row in rows.tolist():
            self._final.pop(row, None)
        for b in torch.nonzero(steps.truncated)[:, 0].tolist():
            self._final[int(rows[b])] = steps.next_observation[b].clone()
        self._heads[simulators] += 1
        self._counts[simulators] = np.minimum(self._counts[simulators] + 1, self.length)
        next_rows = self._rows(self._heads[simulators], simulators)
        self._columns["observation"][next_rows] = steps.next_observation

    def restart(self, first_simulator: int, count: int) -> None:
        """The simulators from ``first_simulator`` on were reset: end their trajectories there, as if
        truncated."""
        for b in range(first_simulator, first_simulator + count):
            if not self._counts[b]:
                continue
            newest = int(self._rows(self._heads[b] - 1, np.int64(b)))
            ended = self._columns["terminated"][newest] | self._columns["truncated"][newest]
            if not ended:
                self._columns["truncated"][newest] = True
                after = int(self._rows(self._heads[b], np.int64(b)))
                self._final[newest] = self._columns["observation"][after].clone()

    def forget(self) -> None:
        """Discard all steps."""
        self._counts[:] = 0
        self._final.clear()

    def draw(self, batch: int, steps: int, generator: torch.Generator, every: bool) -> SequenceSample:
        """``batch`` sequences of up to ``steps`` steps; their first steps are drawn uniformly from all steps.

        every: see ``Sequences``. Raises ValueError if there are no steps.
        """
        if not len(self):
            raise ValueError("there are no steps yet: draw after observe")
        # first steps, numbered over all simulators, one after the other
        numbers = torch.randint(len(self), (batch,), generator=generator, device="cpu").numpy()
        ends = np.cumsum(self._counts)
        simulator = np.searchsorted(ends, numbers, side="right")
        remaining = ends[simulator] - numbers  # steps from the first one to the newest
        start = self._heads[simulator] - remaining
        times = start + np.arange(steps)[:, None]
        rows = torch.from_numpy(self._rows(times, simulator))
        ended = (self._columns["terminated"][rows] | self._columns["truncated"][rows]).numpy()
        length = np.minimum(np.where(ended.any(0), ended.argmax(0) + 1, steps), remaining)
        valid = torch.from_numpy(np.arange(steps)[:, None] < length)
        last = rows[torch.from_numpy(length - 1), torch.arange(batch, device="cpu")]
        next_rows = torch.from_numpy(self._rows(start + length, simulator))
        last_observation = self._read("observation", next_rows)
        if self._final:
            for b, row in enumerate(last.tolist()):
                if row in self._final:
                    last_observation[b] = self._final[row]

        def masked(name: str) -> Tensor:  # 0 after the end of a sequence
            values = self._read(name, rows)
            return values * valid.view(*valid.shape, *(1,) * (values.dim() - 2))

        return SequenceSample(
            observation=self._read("observation", rows if every else rows[:1]),
            action=masked("action"),
            reward=masked("reward"),
            length=torch.from_numpy(length),
            terminated=self._columns["terminated"][last],
            last_observation=last_observation,
            behaviour={name: masked(RECORDED + name) for name in self._behaviour},
        )

    def _read(self, name: str, rows: Tensor) -> Tensor:
        """A column's values at ``rows`` [...]. index_select, which copies whole rows, is faster than
        indexing."""
        values = self._columns[name]
        return values.index_select(0, rows.flatten()).view(*rows.shape, *values.shape[1:])

    def _rows(self, time: Any, simulator: Any) -> Any:
        """Row of step number ``time`` of ``simulator``; both may be arrays."""
        return time % self._slots * self.simulators + simulator

    def state(self) -> dict[str, Any]:
        return {
            "columns": {name: values.clone() for name, values in self._columns.items()},
            "heads": torch.from_numpy(self._heads.copy()),
            "counts": torch.from_numpy(self._counts.copy()),
            "final": {str(row): observation for row, observation in self._final.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        for name, values in self._columns.items():
            values.copy_(state["columns"][name])
        self._heads[:] = state["heads"].numpy()
        self._counts[:] = state["counts"].numpy()
        self._final = {int(row): observation for row, observation in state["final"].items()}


def trajectory_bytes(spec: EnvSpec, length: int, simulators: int, behaviour: Shapes | None = None) -> int:
    """Memory of ``Trajectories``, apart from final observations of truncated episodes."""
    observation_bytes = math.prod(spec.observation_shape) * spec.observation_dtype.itemsize
    recorded = sum(math.prod(shape) for shape in (behaviour or {}).values())
    action_bytes = 4 * math.prod(spec.action_shape) if not spec.actions else 8
    return (length + 1) * simulators * (observation_bytes + action_bytes + 4 * recorded + 6)
