"""An agent with two optimizers and four updates a batch: clipped policy gradients (Schulman et al. 2017) with
a policy and a value net of their own, for any world with a few discrete actions. And its recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from murmurate.agents.interface import Action
from murmurate.evaluation.games import Games
from murmurate.losses.returns import generalized_advantages
from murmurate.ranges import PositiveFloat, PositiveInt, UnitInterval
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.sources.rollouts import RolloutSourceConfig
from murmurate.spec import Batch, EnvSpec, Outcome, Rollouts, Trajectory, derive_generator
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.worlds.registry import world


@dataclass(frozen=True)
class TwoNets(LearnerConfig):
    """steps: of a rollout. epochs: updates of each net from it. ratio: where the surrogate is clipped.
    normalize: advantages, by their mean and deviation over all replicas. learning_rate: of both
    optimizers."""

    name: ClassVar[str] = "two-nets"
    summary: ClassVar[str] = "clipped policy gradients with two nets and four updates a rollout"

    steps: PositiveInt = 16
    epochs: PositiveInt = 4
    ratio: UnitInterval = 0.2
    normalize: bool = False
    learning_rate: PositiveFloat = 3e-3

    @property
    def requires(self) -> Rollouts:
        return Rollouts(self.steps, {"log_probability": ()})

    def updates(self, batches: int) -> int:
        return batches * self.epochs

    def build(self, context: Context) -> TwoNetsAgent:
        return TwoNetsAgent(self, context)


def net(spec: EnvSpec, outputs: int, generator: torch.Generator) -> nn.Sequential:
    inputs = int(torch.tensor(spec.observation_shape).prod())
    made = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))
    for x in made.parameters():
        nn.init.uniform_(x, -0.1, 0.1, generator=generator)
    return made


class TwoNetsAgent:
    def __init__(self, config: TwoNets, context: Context) -> None:
        self.config, spec = config, context.spec
        generator = derive_generator(context.seed, "nets")
        rate = config.learning_rate
        self._group = context.group() if config.normalize else None
        self.policy = net(spec, spec.actions, generator).to(context.device)
        self.value = net(spec, 1, generator).to(context.device)
        self._policy = context.replicate("policy", self.policy, lambda p: torch.optim.Adam(p, lr=rate))
        self._value = context.replicate("value", self.value, lambda p: torch.optim.Adam(p, lr=rate))

    @property
    def replicas(self) -> dict[str, Any]:
        return {"policy": self._policy, "value": self._value}

    @property
    def acting(self) -> tuple[str, ...]:
        return ("policy",)

    def assign_simulators(self, first: int, total: int) -> None:
        pass

    def initial_memory(self, batch: int) -> Tensor | None:
        return None

    @torch.no_grad()
    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        score = self.policy(observation.float()).log_softmax(-1)
        if greedy:
            return Action(score.argmax(-1), None)
        action = torch.multinomial(score.exp(), 1, generator=generator)
        chosen = score.gather(-1, action)[:, 0]
        return Action(action[:, 0], None, behaviour={"log_probability": chosen})

    def learn(self, batch: Batch) -> Outcome:
        data: Trajectory = batch.data
        seen = data.observation.float()
        with torch.no_grad():
            value = self.value(seen.flatten(0, 1)).view(data.reward.shape)
            last = self.value(data.last_observation.float())[:, 0]
            ends = torch.zeros_like(value)
            if data.truncated_observation is not None:
                ends[data.truncated] = self.value(data.truncated_observation.float())[:, 0]
            advantage = generalized_advantages(
                data.reward, value, data.terminated, data.truncated, last, ends, discount=0.99, lambda_=0.95
            )
            target = advantage + value
            if self._group is not None:
                mean, square = self._group.mean((advantage.mean(), advantage.square().mean()))
                advantage = (advantage - mean) / (square - mean**2).clamp(min=1e-8).sqrt()
        for _ in range(self.config.epochs):
            score = self.policy(seen.flatten(0, 1)).log_softmax(-1).view(*data.action.shape, -1)
            now = score.gather(-1, data.action[..., None])[..., 0]
            ratio = (now - data.behaviour["log_probability"]).exp()
            clipped = ratio.clamp(1 - self.config.ratio, 1 + self.config.ratio)
            policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
            self._policy.descend(policy_loss)
            value_loss = (self.value(seen.flatten(0, 1)).view_as(target) - target).square().mean()
            self._value.descend(value_loss)
        losses = {"loss": policy_loss.detach(), "value_loss": value_loss.detach()}
        return Outcome(losses | {"advantage_mean": advantage.mean()})

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass


ALGORITHM = "two-nets"


def recipe(name: str) -> Run:
    return Run(
        recipe=f"{name}-{ALGORITHM}",
        world=world(name),
        learner=TwoNets(),
        strategy=AllReduce(),
        source=RolloutSourceConfig(simulators=4),
        evaluation=Games(3),
        env_steps=50_000,
    )
