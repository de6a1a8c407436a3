"""An actor source with bounded lag: a thread plays with a copy of the policy while the learner learns."""

from __future__ import annotations

import copy
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from murmurate import recipes
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeInt, PositiveInt
from murmurate.replicator.learner import updates_of
from murmurate.sources.interface import RunView, SourceConfig, SourceContext
from murmurate.sources.rollouts import RolloutSourceConfig
from murmurate.spec import Batch
from murmurate.training.run import Run


@dataclass(frozen=True)
class LaggedRolloutSourceConfig(SourceConfig):
    """simulators: per learner. lag: rollouts that wait for the learner, at most."""

    simulators: PositiveInt = 4
    lag: NonNegativeInt = 2

    gives: ClassVar[str] = "rollouts"

    def check(self, run: RunView) -> None:
        if self.lag < 1:
            raise Refusal(f"lag is {self.lag}; at least one rollout waits. Use --lag 1.")

    def batches(self, run: RunView) -> int | None:
        return RolloutSourceConfig(self.simulators).batches(run)

    def check_state(self, state: dict[str, Any]) -> None:
        RolloutSourceConfig(self.simulators).check_state(state)

    def open(self, context: SourceContext) -> LaggedRollouts:
        return LaggedRollouts(self, context)


class LaggedRollouts:
    """Plays with parameters that are at most ``lag + 1`` batches old: a rollout begins with the newest ones,
    and there is room for so many."""

    exact = False  # what waits is not saved

    def __init__(self, config: LaggedRolloutSourceConfig, context: SourceContext) -> None:
        self.alive: Callable[[int], bool] = lambda played: False
        self._learner, self._lock = context.learner, threading.Lock()
        self._policy = copy.copy(context.learner)
        for name, module in vars(context.learner).items():
            if isinstance(module, torch.nn.Module):
                setattr(self._policy, name, copy.deepcopy(module))
        acting = dataclasses.replace(context, learner=self._policy)
        self._rollouts = RolloutSourceConfig(config.simulators).open(acting)
        self._ready: queue.Queue[tuple[Batch, int]] = queue.Queue(config.lag)
        self._lag = self._lag_max = 0
        self._stopped = False
        self._thread: threading.Thread | None = None

    def _play(self) -> None:
        for batch in self._rollouts:
            version = self._version
            whole = copy.deepcopy(batch)  # its tensors are used again
            while not self._stopped:
                try:
                    self._ready.put((whole, version), timeout=0.05)
                    break
                except queue.Full:
                    continue
            if self._stopped:
                return
            self._refresh()

    def _refresh(self) -> None:
        with self._lock, torch.no_grad():
            self._version = updates_of(self._learner)
            for name, module in vars(self._learner).items():
                if isinstance(module, torch.nn.Module):
                    own = getattr(self._policy, name)
                    for mine, newest in zip(own.parameters(), module.parameters(), strict=True):
                        mine.copy_(newest)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._thread is None:
            self._refresh()
            self._thread = threading.Thread(target=self._play, daemon=True)
            self._thread.start()
        batch, version = self._ready.get()
        self._lag = updates_of(self._learner) - version
        self._lag_max = max(self._lag_max, self._lag)
        return batch

    def fields(self) -> dict[str, Any]:
        return {"lag_updates": self._lag, "lag_updates_max": self._lag_max}

    def events(self) -> Sequence[tuple[str, str]]:
        return ()

    def _pause(self) -> None:
        self._stopped = True
        if self._thread is not None:
            self._thread.join()
        self._thread, self._stopped = None, False
        while not self._ready.empty():
            self._ready.get()

    def state(self) -> dict[str, Any]:
        self._pause()
        return self._rollouts.state()

    def load(self, state: dict[str, Any]) -> None:
        self._rollouts.load(state)

    def fresh_start(self, batches: int) -> None:
        self._rollouts.fresh_start(batches)

    def close(self) -> None:
        self._pause()
        self._rollouts.close()


ALGORITHM = "lagged-a2c"


def recipe(name: str) -> Run:
    """A2C on rollouts that are a little old."""
    usual = recipes.recipe(f"{name}-a2c")
    return dataclasses.replace(usual, recipe=f"{name}-{ALGORITHM}", source=LaggedRolloutSourceConfig())
