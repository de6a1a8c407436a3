"""An off-policy agent: Q-learning that explores with probabilities proportional to exp(Q / temperature). And
its recipe, with a replay that draws transitions whose values were too low more often."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from murmurate.agents.interface import Action, OneReplica
from murmurate.evaluation.games import Games
from murmurate.nets.target import TargetNetwork
from murmurate.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval
from murmurate.replay.config import ReplayConfig
from murmurate.replay.interface import Sample
from murmurate.replay.priorities import Prioritized
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.sources.replay_source import ReplaySourceConfig
from murmurate.spec import Batch, Outcome, Transitions, derive_generator
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.run import Run
from murmurate.worlds.registry import world


@dataclass(frozen=True)
class SoftmaxQ(LearnerConfig):
    """batch: transitions of an update. n_step: steps of the returns. discount: discount factor per env step.
    temperature: of the exploration. learning_rate: learning rate of Adam. target_every: updates between
    copies of the net to the target net."""

    name: ClassVar[str] = "softmax-q"
    summary: ClassVar[str] = "Q-learning from a replay with softmax exploration"

    batch: PositiveInt = 64
    n_step: PositiveInt = 5
    discount: UnitInterval = 0.99
    temperature: PositiveFloat = 1.0
    learning_rate: PositiveFloat = 1e-3
    target_every: PositiveInt = 200

    @property
    def requires(self) -> Transitions:
        return Transitions(self.batch, self.n_step, self.discount)

    def build(self, context: Context) -> SoftmaxQAgent:
        return SoftmaxQAgent(self, context)


class SoftmaxQAgent(OneReplica):
    def __init__(self, config: SoftmaxQ, context: Context) -> None:
        self.config, spec = config, context.spec
        inputs = nn.Linear(math.prod(spec.observation_shape), 64)
        self.net = nn.Sequential(nn.Flatten(), inputs, nn.ReLU(), nn.Linear(64, spec.actions))
        generator = derive_generator(context.seed, "net")
        for x in self.net.parameters():
            nn.init.uniform_(x, -0.1, 0.1, generator=generator)
        self.net.to(context.device)
        self.replica = context.replicate(
            "q", self.net, lambda p: torch.optim.Adam(p, lr=config.learning_rate), clip=10.0
        )
        self.target = TargetNetwork(self.net, every=config.target_every)

    @torch.no_grad()
    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        values = self.net(observation.float())
        greedy_value, action = values.max(-1)
        if not greedy:
            policy = (values / self.config.temperature).softmax(-1)
            action = torch.multinomial(policy, 1, generator=generator)[:, 0]
        # the values give new transitions their first priorities
        return Action(action, None, values.gather(-1, action[:, None])[:, 0], greedy_value)

    def learn(self, batch: Batch) -> Outcome:
        data: Sample = batch.data
        with torch.no_grad():
            next_value = self.target(data.next_observation.float()).max(-1).values
            target = data.reward + data.discount * next_value
        value = self.net(data.observation.float()).gather(-1, data.action[:, None])[:, 0]
        error = target - value
        loss = (data.weights * error.square()).mean()
        exchange = self.replica.descend(loss)
        self.target.after_update(exchange.staleness, self.replica.common_rounds)
        metrics = {"loss": loss.detach(), "q_mean": value.detach().mean}
        return Outcome(metrics, priorities=error.detach())

    def state(self) -> dict[str, Any]:
        return self.target.state()

    def load(self, state: dict[str, Any]) -> None:
        self.target.load(state)


@dataclass(frozen=True)
class OptimisticReplay(ReplayConfig):
    """optimism: factor of the errors of values that were too low."""

    optimism: NonNegativeFloat = 2.0

    def new_sampler(self, slots: int, seed: int, threads: int = 1) -> Optimistic:
        sampler = Optimistic(slots, alpha=self.alpha, epsilon=self.epsilon, seed=seed, threads=threads)
        sampler.optimism = self.optimism
        return sampler


class Optimistic(Prioritized):
    optimism = 1.0

    def update(self, slots: Tensor, error: Tensor) -> None:
        super().update(slots, torch.where(error > 0, self.optimism * error, error))


ALGORITHM = "softmax-q"
ACTIONS = "discrete"


def recipe(name: str) -> Run:
    replay = OptimisticReplay(capacity=50_000, learning_starts=1_000, samples_per_insert=8.0)
    return Run(
        recipe=f"{name}-{ALGORITHM}",
        world=world(name),
        learner=SoftmaxQ(),
        strategy=AllReduce(),
        source=ReplaySourceConfig(simulators=8, replay=replay),
        evaluation=Games(),
        env_steps=50_000,
    )
