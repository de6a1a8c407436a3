"""Batches from a replay that fills while they are drawn: who plays learns from what it remembers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from murmurate.collect.interface import Actor, Simulators
from murmurate.collect.steps import steps_of
from murmurate.replay.ahead import Ahead
from murmurate.replay.config import ReplayConfig
from murmurate.replay.interface import Replay, Sample
from murmurate.spec import Batch, Episode, derive_generator, derive_seed


@dataclass
class ReplayBatch(Batch):
    """A batch whose errors become priorities; ``data`` is a ``Sample``."""

    replay: Replay | None = None
    keys: Tensor | None = None

    def feedback(self, priorities: Tensor | None) -> None:
        if priorities is not None and self.replay is not None and self.keys is not None:
            self.replay.update(self.keys, priorities.detach().float().cpu())


class Replayed:
    """Yields ``Batch(data=Sample)`` for ever: all simulators take a step whenever the learner has drawn each
    transition ``samples_per_insert`` times on average.

    ``groups`` are opened simulators (see ``open_groups``), closed by ``close``; while one group steps in
    native threads the agent acts for another. A batch is valid until the next one is asked for.

    progress: share of the run that lies behind, for beta. seat: told which simulator is the first of those
        that the actor is asked to act for next.
    """

    def __init__(
        self,
        groups: Sequence[Simulators],
        actor: Actor,
        replay: Replay,
        config: ReplayConfig,
        batch: int,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        progress: Callable[[], float],
        seat: Callable[[int], None] = lambda low: None,
    ) -> None:
        self.actor, self.replay, self.config, self.batch = actor, replay, config, batch
        self.alive: Callable[[int], bool] = lambda played: False
        self._groups = list(groups)
        self._seed, self._progress, self._seat = seed, progress, seat
        self._device = torch.device(device)
        ends = torch.tensor([group.size for group in groups]).cumsum(0).tolist()
        self._slices = [slice(end - group.size, end) for end, group in zip(ends, groups, strict=True)]
        self._size = int(ends[-1])
        self._ahead = Ahead(replay, batch, config.ahead, pinned=self._device.type == "cuda")
        self._generator = derive_generator(seed, "actions", device=self._device)
        self._batches = self._played = self._drawn = 0
        self._started = False
        self._now: list[Tensor] = []  # what each group's simulators show
        self._first = torch.ones(self._size, dtype=torch.bool)
        self._memory: list[Tensor | None] = [None] * len(self._groups)

    @property
    def exact(self) -> bool:
        self._start()
        return self.config.saved and all(group.state() is not None for group in self._groups)

    def fields(self) -> dict[str, Any]:
        after = max(self._played - self.config.learning_starts, 1)
        return {
            "replay_transitions": len(self.replay),
            "samples_per_insert": self._drawn / after,
            "beta": self._beta(),
        }

    def events(self) -> list[tuple[str, str]]:
        return []

    def __iter__(self) -> Replayed:
        return self

    def __next__(self) -> Batch:
        self._start()
        played, episodes = 0, list[Episode]()
        while not self._due():
            if self.alive(played):
                return Batch(None, played, episodes)
            episodes += self._turn()
            played += self._size
        self._drawn += self.batch
        self._batches += 1
        sample = self._ahead.next(self._beta())
        data = there(sample, self._device)
        return ReplayBatch(data, played, episodes, replay=self.replay, keys=sample.keys)

    def _due(self) -> bool:
        """Whether there is enough to draw from, and too little has been drawn."""
        allowed = self.config.samples_per_insert * (self._played - self.config.learning_starts)
        return self._drawn + self.batch <= allowed and len(self.replay) >= self.batch

    def _beta(self) -> float:
        return self.config.beta_at(self._progress())

    def _turn(self) -> list[Episode]:
        """One step of all simulators."""
        actions = []
        for g, group in enumerate(self._groups):
            first = self._first[self._slices[g]].to(self._device)
            seen = self._now[g].to(self._device, non_blocking=True)
            self._seat(self._slices[g].start)
            with torch.no_grad():
                chosen = self.actor.act(seen, self._memory[g], first, self._generator)
            self._memory[g] = chosen.memory
            actions.append(chosen.action.cpu())
            group.send(actions[g])
        if self.replay.full:
            self._ahead.settle()
        episodes = []
        for g, group in enumerate(self._groups):
            part, step = self._slices[g], group.receive()
            self.replay.observe(part.start, steps_of(self._now[g], actions[g], step))
            self._now[g] = step.observation
            torch.logical_or(step.terminated, step.truncated, out=self._first[part])
            episodes += [Episode(part.start + e.simulator, e.episode_return, e.length) for e in step.episodes]
        self._played += self._size
        return episodes

    def _start(self) -> None:
        if not self._started:
            self._now = [self._begun(g) for g in range(len(self._groups))]
            self._started = True

    def _begun(self, g: int) -> Tensor:
        """New games for a group; after a resume not those that it began with."""
        group, part = self._groups[g], self._slices[g]
        step = group.reset(derive_seed(self._seed, "games", self._batches))
        self._first[part] = True
        self._memory[g] = self.actor.initial_memory(group.size)
        self.replay.restart(part.start, group.size)
        return step.observation

    def state(self) -> dict[str, Any]:
        """Between two batches only. Groups that cannot be saved are None in it."""
        self._start()
        memory = [part for part in self._memory if part is not None]
        return {
            "batches": self._batches,
            "played": self._played,
            "drawn": self._drawn,
            "groups": [group.state() for group in self._groups],
            "generator": self._generator.get_state(),
            "observation": torch.cat(self._now),
            "first": self._first.clone(),
            "memory": torch.cat(memory) if memory else None,
            "replay": {"store": self.replay.state(), "ahead": self._ahead.state()}
            if self.config.saved
            else None,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; groups that could not be saved begin new games, unlike any before. Where
        there is no replay in it, the learner goes on as soon as a batch can be drawn.

        Raises ``ValueError`` for a state of other groups.
        """
        if len(state["groups"]) != len(self._groups) or len(state["first"]) != self._size:
            raise ValueError(
                f"the state is of {len(state['first'])} simulators in {len(state['groups'])} groups, "
                f"these are {self._size} in {len(self._groups)}"
            )
        self._batches = state["batches"]
        self._generator.set_state(state["generator"])
        if state["replay"] is None:
            self._played, self._drawn = self.config.learning_starts, 0
        else:
            self._played, self._drawn = state["played"], state["drawn"]
            self.replay.load(state["replay"]["store"])
            self._ahead.load(state["replay"]["ahead"])
        self._now = []
        for g, (group, saved) in enumerate(zip(self._groups, state["groups"], strict=True)):
            part = self._slices[g]
            if saved is None:
                self._now.append(self._begun(g))
                continue
            group.load(saved)
            self._now.append(state["observation"][part].clone())
            self._first[part] = state["first"][part]
            memory = state["memory"]
            self._memory[g] = None if memory is None else memory[part].to(self._device, copy=True)
        self._started = True

    def close(self) -> None:
        self._ahead.close()
        for group in self._groups:
            group.close()


def there(sample: Sample, device: torch.device) -> Sample:
    """The batch on the learner's device."""
    if device.type == "cpu":
        return sample
    return Sample(**{name: x.to(device, non_blocking=True) for name, x in vars(sample).items()})
