"""Batches from a replay that fills while they are drawn: who plays learns from what it remembers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from murmurate.fabric.interface import Channel
from murmurate.sources.bank_weights import Banks
from murmurate.sources.replay_sampler import Drawing
from murmurate.sources.steps import steps_of
from murmurate.spec import Batch, Episode, derive_generator, derive_seed
from murmurate.worlds.interface import Actor, Simulators


class Replayed:
    """Yields ``Batch(data=Sample)`` for ever: all simulators take a step whenever the learner has drawn each
    transition ``samples_per_insert`` times on average.

    ``groups`` are opened simulators (see ``open_groups``), closed by ``close``; while one group steps in
    native threads the agent acts for another. A batch is valid until the next one is asked for.

    drawing: closed by ``close``. seat: told which simulator is the first of those
        that the actor is asked to act for next.
    """

    def __init__(
        self,
        groups: Sequence[Simulators],
        actor: Actor,
        drawing: Drawing,
        *,
        seed: int,
        seat: Callable[[int], None] = lambda low: None,
    ) -> None:
        self.actor, self.replay = actor, drawing.replay
        self.alive: Callable[[int], bool] = lambda played: False
        self._groups = list(groups)
        self._seed, self._seat = seed, seat
        self._drawing, self._device = drawing, drawing.device
        ends = torch.tensor([group.size for group in groups]).cumsum(0).tolist()
        self._slices = [slice(end - group.size, end) for end, group in zip(ends, groups, strict=True)]
        self._size = int(ends[-1])
        self._generator = derive_generator(seed, "actions", device=self._device)
        self._started = False
        self._now: list[Tensor] = []  # what each group's simulators show
        self._first = torch.ones(self._size, dtype=torch.bool)
        self._memory: list[Tensor | None] = [None] * len(self._groups)

    @property
    def exact(self) -> bool:
        self._start()
        if self._drawing.banks is not None:  # what others' banks held when it was looked at
            return False
        return self._drawing.exact and all(group.state() is not None for group in self._groups)

    def fields(self) -> dict[str, Any]:
        return self._drawing.fields()

    def share(self, channel: Channel, learners: int) -> None:
        self._drawing.banks = Banks(channel, learners)

    def events(self) -> list[tuple[str, str]]:
        return []

    def __iter__(self) -> Replayed:
        return self

    def __next__(self) -> Batch:
        self._start()
        played, episodes = 0, list[Episode]()
        while not self._drawing.due:
            if self.alive(played):
                return Batch(None, played, episodes)
            episodes += self._turn()
            played += self._size
        return self._drawing.next(played, episodes)

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
        self._drawing.before_steps()
        episodes = []
        for g, group in enumerate(self._groups):
            part, step = self._slices[g], group.receive()
            self._drawing.take_in(part.start, steps_of(self._now[g], actions[g], step))
            self._now[g] = step.observation
            torch.logical_or(step.terminated, step.truncated, out=self._first[part])
            episodes += [Episode(part.start + e.simulator, e.episode_return, e.length) for e in step.episodes]
        return episodes

    def _start(self) -> None:
        if not self._started:
            self._now = [self._begun(g) for g in range(len(self._groups))]
            self._started = True

    def _begun(self, g: int) -> Tensor:
        """New games for a group; after a resume not those that it began with."""
        group, part = self._groups[g], self._slices[g]
        step = group.reset(derive_seed(self._seed, "games", self._drawing.batches))
        self._first[part] = True
        self._memory[g] = self.actor.initial_memory(group.size)
        self.replay.restart(part.start, group.size)
        return step.observation

    def state(self) -> dict[str, Any]:
        """Between two batches only. Groups that cannot be saved are None in it."""
        self._start()
        memory = [part for part in self._memory if part is not None]
        return {
            **self._drawing.state(),
            "groups": [group.state() for group in self._groups],
            "generator": self._generator.get_state(),
            "observation": torch.cat(self._now),
            "first": self._first.clone(),
            "memory": torch.cat(memory) if memory else None,
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
        self._generator.set_state(state["generator"])
        self._drawing.load(state)
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
        self._drawing.close()
        for group in self._groups:
            group.close()
