"""A trained agent as a function of tensors: observations to greedy actions and the nets' outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from murmurate.errors import Refusal
from murmurate.spec import EnvSpec
from murmurate.workloads.image_classifier import EVALUATION_BATCH
from murmurate.worlds.viewed import rescaled


@dataclass(frozen=True)
class Signature:
    """Names of a program's inputs and outputs, in order."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class GreedyPolicy(nn.Module):
    """The greedy actions of an agent, as its ``act`` computes them.

    forward(observation [B, ...]) or, for a recurrent agent, forward(observation, memory [B, M], first [B]
    bool): ``first`` resets the memory of episodes that begin. Returns the actions ([B], or [B, *action_shape]
    in the environment's bounds), then outputs [B, ...] of the nets (``logits``, say), then the new memory.

    low, high: bounds to which actions from -1 to 1 are rescaled; None: clipped to those of ``spec``.
    """

    low: Tensor
    high: Tensor

    def __init__(self, agent: Any, spec: EnvSpec, low: Any = None, high: Any = None) -> None:
        super().__init__()
        self.nets = nn.ModuleDict({name: agent.replicas[name].module for name in agent.acting})
        self._agent, self._spec = agent, spec
        self._generator = torch.Generator()
        # persistent buffers, so that a copy of the program has them
        self.register_buffer("low", _bounds(low if low is not None else spec.action_low, spec))
        self.register_buffer("high", _bounds(high if high is not None else spec.action_high, spec))
        self._rescales = low is not None
        self.recurrent = agent.initial_memory(1) is not None
        with torch.no_grad():
            action = self._act(*self.example(2, torch.Generator().manual_seed(0)))
        self._names = tuple(action.outputs)
        memory = ("memory",) * self.recurrent
        inputs = ("observation", *memory, *(("first",) * self.recurrent))
        self.signature = Signature(inputs, ("action", *self._names, *(f"new_{m}" for m in memory)))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        result = self._act(*inputs)
        actions = result.action
        if self._spec.action_shape:
            actions = actions.view(-1, *self._spec.action_shape)
            if self._rescales:
                actions = rescaled(actions, self.low, self.high - self.low)
            else:
                actions = torch.minimum(torch.maximum(actions, self.low), self.high)
        memory = (result.memory,) if self.recurrent else ()
        return (actions, *(result.outputs[name] for name in self._names), *memory)

    def _act(self, observation: Tensor, memory: Tensor | None = None, first: Tensor | None = None) -> Any:
        if first is None:
            first = observation.new_zeros(observation.shape[0], dtype=torch.bool)
        return self._agent.act(observation, memory, first, self._generator, greedy=True)

    def example(self, batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        observation = random_observations(self._spec, batch, generator)
        if not self.recurrent:
            return (observation,)
        memory = self._agent.initial_memory(batch)
        first = torch.rand(batch, generator=generator) < 0.5
        return observation, torch.rand(memory.shape, generator=generator) - 0.5, first

    def refuse_random(self) -> None:
        """Raise Refusal if even greedy actions are drawn: then they are no function of the inputs."""
        inputs = self.example(64, torch.Generator().manual_seed(1))
        with torch.no_grad():
            first = self._act(*inputs).action
            is_deterministic = all(torch.equal(first, self._act(*inputs).action) for _ in range(3))
        if not is_deterministic:
            raise Refusal(
                "this agent draws its actions at random even when greedy, so they are no function to export. "
                "Export its weights (.safetensors); runs of arm with --agent.evaluate greedy can be exported."
            )


class ClassProbabilities(nn.Module):
    """A learner without actions: forward(observation [B, ...]) returns (probabilities [B, K],).

    module: what the learner's ``program()`` returns.
    """

    def __init__(self, module: nn.Module, spec: EnvSpec) -> None:
        super().__init__()
        self.module, self._spec = module, spec
        self.signature = Signature(("observation",), ("probabilities",))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return (self.module(*inputs),)

    def in_batches(self, observations: Tensor) -> Tensor:
        """The probabilities [B, K], without gradients; the memory of a pass does not grow with B."""
        with torch.no_grad():
            return torch.cat([self.module(batch) for batch in torch.split(observations, EVALUATION_BATCH)])

    def example(self, batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (random_observations(self._spec, batch, generator),)


def random_observations(spec: EnvSpec, batch: int, generator: torch.Generator) -> Tensor:
    """[batch, ...]: uniform bytes if observations, or a part of them, are images or uint8; other numbers are
    from a standard normal."""
    shape = (batch, *spec.observation_shape)
    if spec.observation_dtype == torch.uint8:
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    drawn = torch.randn(shape, generator=generator).to(spec.observation_dtype)
    steps = drawn.view(batch, spec.history, -1) if spec.parts else drawn
    for _, start, stop, image in spec.parts:
        if image:
            pixels = torch.randint(256, (batch, spec.history, stop - start), generator=generator)
            steps[..., start:stop] = pixels.to(steps.dtype)
    return drawn


def _bounds(bounds: Any, spec: EnvSpec) -> Tensor:
    return torch.as_tensor(bounds, dtype=torch.float32).reshape(spec.action_shape or (-1,)).clone()
