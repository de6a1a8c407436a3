"""Masks of illegal actions, which environments give as a part of their observations."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from murmurate.errors import Refusal
from murmurate.spec import EnvSpec

PART = "action_mask"  # key of the observation
LOWEST = -1e8  # of an illegal action: finite, so that a probability of 0 times it is 0


@dataclass(frozen=True)
class ActionMask:
    """Gives illegal actions the logit or value ``LOWEST``.

    start, stop: place of the mask in an observation; an action is legal where its number there is above 0.
    sizes: numbers of values of an action's parts, side by side. Where no value of a part is legal, all are.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]

    def legal(self, observation: Tensor) -> Tensor:
        """Observations [..., D], as the environment gives them, to bool [..., A]."""
        legal = observation[..., self.start : self.stop] > 0
        return torch.cat([part | ~part.any(-1, keepdim=True) for part in self._split(legal)], -1)

    def random(self, observation: Tensor, generator: torch.Generator) -> Tensor:
        """Legal actions for observations [B, D], drawn uniformly: [B] int64, or [B, parts] float32."""
        legal = self.legal(observation).float()
        drawn = [torch.multinomial(part, 1, generator=generator) for part in self._split(legal)]
        return drawn[0][:, 0] if len(drawn) == 1 else torch.cat(drawn, 1).float()

    def first_legal(self, observation: Tensor) -> Tensor:
        """The first legal actions for observations [B, D]: [B] int64, or [B, parts] float32."""
        first = [part.int().argmax(-1) for part in self._split(self.legal(observation))]
        return first[0] if len(first) == 1 else torch.stack(first, -1).float()

    def _split(self, values: Tensor) -> tuple[Tensor, ...]:
        return torch.split(values, list(self.sizes), -1)

    def __call__(self, values: Tensor, observation: Tensor) -> Tensor:
        """Logits or values [..., A] for observations [..., D]: ``LOWEST`` where an action is illegal."""
        return values.masked_fill(~self.legal(observation), LOWEST)


def masked(values: Tensor, observation: Tensor, mask: ActionMask | None) -> Tensor:
    """Logits or values [..., A] in float32, by ``mask`` where a world has one."""
    values = values.float()
    return values if mask is None else mask(values, observation)


@functools.cache
def action_mask(spec: EnvSpec) -> ActionMask | None:
    """The mask of a world's discrete actions; None if its observations have no part ``action_mask``.

    Where observations are stacked, the newest one's. Raises Refusal for a part that does not have one number
    for each action.
    """
    places = [(start, stop) for name, start, stop, _ in spec.parts if name.partition(".")[0] == PART]
    if not (places and spec.categorical):
        return None
    start, stop = places[0][0], places[-1][1]  # of a Dict or Tuple of masks, all lie side by side
    sizes = spec.factors or (spec.actions,)
    if stop - start != sum(sizes):
        raise Refusal(
            f"The part {PART} of the observations of {spec.name} has {stop - start} numbers, and there are "
            f"{sum(sizes)} actions, or values of all parts of an action. Give MultiBinary({sum(sizes)}); "
            "for actions of several parts, --world.joint-actions says whether they are numbered together. To "
            "ignore the mask, name the other keys with --world.observe."
        )
    earlier = (spec.history - 1) * (spec.observation_shape[0] // spec.history)
    return ActionMask(earlier + start, earlier + stop, sizes)
