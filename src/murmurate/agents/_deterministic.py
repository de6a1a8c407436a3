"""Shared by DDPG and TD3: critics of actions, and a policy that follows the first critic's gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from murmurate.agents._noise import UpdateNoise
from murmurate.agents._off_policy import passes, policy_and_critics, replicate, target_passes
from murmurate.agents._running import statistics_updater
from murmurate.agents.interface import Action, ActsByPolicy
from murmurate.losses.continuous import clipped_target, squared_error
from murmurate.nets.target import TargetNetwork
from murmurate.replay.interface import Sample
from murmurate.replica.clipping import check_loss
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Batch, Outcome


class DeterministicAgent(ActsByPolicy):
    """One actor-learner (see ``Agent``), with the replicas ``critic`` and ``policy``.

    config: a ``TD3`` or ``DDPG``. critics_count: 1 or 2. policy_delay: updates of the critics for each update
    of the policy; 0: the policy is updated at the end of each round, as often as the critics were in that
    round (Zhang 2022, Algorithm 8). target_noise, noise_clip: standard deviation and limit of the noise of
    target actions.

    Gradients are computed without autograd (see ``nets.passes``), but for nets of the user's own.
    """

    def __init__(
        self,
        config: Any,
        context: Context,
        *,
        critics_count: int,
        policy_delay: int,
        target_noise: float,
        noise_clip: float,
    ) -> None:
        self.device = context.device
        self.config, self._delay = config, policy_delay
        self._target_noise, self._noise_clip = target_noise, noise_clip
        self.policy, self.critics = policy_and_critics(config, context, critics_count, deterministic=True)
        clip = None if math.isinf(config.clip) else config.clip
        use_bfloat16 = config.precision == "bfloat16"
        self._policy = replicate(context, "policy", self.policy, config.policy_rate, clip, use_bfloat16)
        self._critic = replicate(context, "critic", self.critics, config.critic_rate, clip, use_bfloat16)
        self.targets = tuple(
            TargetNetwork(net, every=config.target_every, polyak=config.polyak)
            for net in (self.policy.net, self.critics)
        )
        self._policy_passes = passes(self._policy, self.policy.net, "net.")
        self._critic_passes = passes(self._critic, self.critics)
        self._target_policy, self._target_critics = (target_passes(target.net) for target in self.targets)
        self._update_statistics = statistics_updater(self.policy.normalizer, context)
        dimensions = math.prod(context.spec.action_shape)
        self._noise = UpdateNoise(context.seed, context.rank, (1, config.batch, dimensions), self.device)
        # observations of this round's batches, if the policy is updated at the end of a round
        self._round_observations: list[Tensor] = []
        self._policy_value: Tensor | None = None  # at its last update since the start or a resume
        self._policy_staleness = 0  # the policy's, at its last update

    @property
    def replicas(self) -> dict[str, Replica]:
        return {"policy": self._policy, "critic": self._critic}

    @torch.no_grad()
    def act(
        self,
        observation: Tensor,
        memory: Tensor | None,
        first: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
    ) -> Action:
        """The policy's action, with Gaussian noise unless ``greedy``, between the bounds."""
        features = self.policy.observation_features(observation)
        scaled = self._policy_passes.result(features[None])[0].tanh_()
        sigma = self.config.exploration_noise
        if not greedy and sigma:
            noise = torch.randn(scaled.shape, generator=generator, device=scaled.device)
            scaled.add_(noise, alpha=sigma).clamp_(-1, 1)
        return Action(self.policy.bounds.to_world(scaled), None)

    # -- learning -----------------------------------------------------------------------------------

    @torch.no_grad()
    def learn(self, batch: Batch) -> Outcome:
        data: Sample = batch.data
        self._update_statistics(data.observation)
        observation = self.policy.observation_features(data.observation)
        target = self._target(data)
        scaled = self.policy.bounds.to_scaled(data.action)
        activations = self._critic_passes.forward(self._critic_input(observation, scaled))
        q = activations[-1][..., 0]
        squared = squared_error(q, target, data.weights)
        check_loss(squared.loss, "critic", self._critic.clock)
        self._critic_passes.backward(activations, squared.slope[..., None])
        exchange = self._critic.follow(self._critic.grad)
        # the staleness is 0 after the last update of a round
        round_ended = not (self._critic.common_rounds and exchange.staleness)
        self._learn_policy(observation, round_ended)
        # a delayed policy has made fewer updates, and its rounds end at other times than the critics'
        staleness = max(exchange.staleness, self._policy_staleness)
        for net in self.targets:
            net.after_update(staleness, self._critic.common_rounds)
        return Outcome(
            {
                "loss": squared.loss,
                "q_mean": q.mean,
                "policy_value": self._policy_value,
                "td_error": lambda: squared.error.abs().mean(),
            },
            priorities=squared.error.abs().mean(0),
        )

    def _target(self, data: Sample) -> Tensor:
        """y [B], from the target nets, with smoothed actions (Fujimoto et al. 2018, eq. 14)."""
        next_observation = self.policy.observation_features(data.next_observation)
        scaled = self._target_policy.forward(next_observation[None])[-1][0].tanh_()
        if self._target_noise:
            noise = self._noise.of(self._critic.clock)[0, : len(scaled)] * self._target_noise
            scaled.add_(noise.clamp_(-self._noise_clip, self._noise_clip)).clamp_(-1, 1)
        values = self._target_critics.forward(self._critic_input(next_observation, scaled))[-1]
        return clipped_target(data.reward, data.discount, values[..., 0])

    def _learn_policy(self, observation: Tensor, round_ended: bool) -> None:
        """Update the policy if it is due. round_ended: whether this was the last update of a round."""
        if self._delay:
            if self._critic.clock % self._delay == 0:
                self._update_policy(observation)
            return
        # all learners have the same critics at the end of a round, so their policies follow the same
        # objective until they are averaged
        self._round_observations.append(observation.clone())  # it may be a view of memory of the next batch
        if round_ended:
            for earlier_observation in self._round_observations:
                self._update_policy(earlier_observation)
            self._round_observations = []

    def _update_policy(self, observation: Tensor) -> None:
        """One step up the gradient of mean Q_1(s, pi(s)) (Silver et al. 2014, eq. 9)."""
        size = len(observation)
        activations = self._policy_passes.forward(observation[None])
        scaled = torch.tanh(activations[-1][0])
        first_critic = slice(0, 1)
        critic_activations = self._critic_passes.forward(
            torch.cat([observation, scaled], 1)[None], first_critic
        )
        self._policy_value = critic_activations[-1].mean()
        output_slope = torch.full_like(critic_activations[-1], -1 / size)
        actions = slice(observation.shape[1], None)
        slope = self._critic_passes.input_slope(critic_activations, output_slope, first_critic, actions)
        slope = slope * (1 - scaled.square())
        self._policy_passes.backward(activations, slope)
        self._policy_staleness = self._policy.follow(self._policy.grad).staleness

    def _critic_input(self, observation: Tensor, scaled: Tensor) -> Tensor:
        """The critics' input [E, B, F + D], one tensor for all of them."""
        joined = torch.cat([observation, scaled], 1)
        return joined.expand(self.critics.members, *joined.shape)

    # -- state --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The target nets, the policy's staleness, and the observations of a round that has not ended."""
        return {
            "policy_staleness": self._policy_staleness,
            "targets": [target.state() for target in self.targets],
            "observed": [observation.clone() for observation in self._round_observations],
        }

    def load(self, state: dict[str, Any]) -> None:
        saved: Sequence[dict[str, Any]] = state["targets"]
        for target, target_state in zip(self.targets, saved, strict=True):
            target.load(target_state)
        self._round_observations = [observation.to(self.device) for observation in state["observed"]]
        self._policy_staleness = int(state.get("policy_staleness", 0))
