"""Shared by agents whose policy is learned by soft actor-critic (Haarnoja et al. 2018b)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from murmurate.agents._noise import UpdateNoise
from murmurate.agents._off_policy import passes, policy_and_critics, replicate, target_passes
from murmurate.agents._running import statistics_updater
from murmurate.agents.interface import Action
from murmurate.losses.continuous import (
    Squashed,
    soft_policy_slope,
    soft_target,
    squared_error,
    squashed_gaussian,
    temperature_slope,
)
from murmurate.nets.control import limited_log_std, through_limit
from murmurate.nets.target import TargetNetwork
from murmurate.replay.interface import Sample
from murmurate.replica.adam import Adam
from murmurate.replica.clipping import check_loss
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.spec import Metric


class Update(NamedTuple):
    """metrics: metrics of the update. error: [B], the mean absolute error of the critics."""

    metrics: dict[str, Metric]
    error: Tensor


class _Draw(NamedTuple):
    """Actions drawn from the policy at a batch of states, and what the policy's gradient needs.

    activations: inputs of the policy's layers. unlimited_log_std, log_std, noise: [B, D].
    """

    drawn: Squashed
    activations: list[Tensor]
    unlimited_log_std: Tensor
    log_std: Tensor
    noise: Tensor


class Temperature(nn.Module):
    """log(alpha), the logarithm of the weight of the policy's entropy."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor([math.log(alpha)]))


class SoftActorCritic:
    """A squashed Gaussian policy, two critics and a temperature: the replicas ``policy``, ``critic`` and
    ``temperature``. A constant temperature has no replica.

    config: a ``SAC``, or another config with its fields. Gradients are computed without autograd (see
    ``nets.passes``), but for nets of the user's own. Raises ValueError for discrete or unbounded actions, for
    images without such nets, and as ``own_nets``.
    """

    def __init__(self, config: Any, context: Context) -> None:
        device = context.device
        self.config = config
        self.policy, self.critics = policy_and_critics(config, context, 2, deterministic=False)
        clip = None if math.isinf(config.clip) else config.clip
        use_bfloat16 = config.precision == "bfloat16"
        self._policy = replicate(context, "policy", self.policy, config.policy_rate, clip, use_bfloat16)
        self._critic = replicate(context, "critic", self.critics, config.critic_rate, clip, use_bfloat16)
        self.replicas: dict[str, Replica] = {"policy": self._policy, "critic": self._critic}
        dimensions = math.prod(context.spec.action_shape)
        self._temperature = Temperature(config.temperature).to(device)
        self._target_entropy = -float(dimensions) if config.target_entropy is None else config.target_entropy
        if config.temperature_rate:
            self.replicas["temperature"] = context.replicate(
                "temperature",
                self._temperature,
                lambda parameters: Adam(parameters, lr=config.temperature_rate),
            )
        self.target = TargetNetwork(self.critics, every=config.target_every, polyak=config.polyak)
        self._policy_passes = passes(self._policy, self.policy.net, "net.")
        self._critic_passes = passes(self._critic, self.critics)
        self._target_passes = target_passes(self.target.net)
        self._update_statistics = statistics_updater(self.policy.normalizer, context)
        self._noise = UpdateNoise(context.seed, context.rank, (2, config.batch, dimensions), device)

    @torch.no_grad()
    def act(self, observation: Tensor, generator: torch.Generator, greedy: bool) -> Action:
        """A draw from the policy; greedy: the squashed mean."""
        features = self.policy.observation_features(observation)
        mean, log_std = self._policy_passes.result(features[None])[0].chunk(2, 1)
        if not greedy:
            noise = torch.randn(mean.shape, generator=generator, device=mean.device)
            mean = torch.addcmul(mean, limited_log_std(log_std).exp(), noise)
        return Action(self.policy.bounds.to_world(torch.tanh(mean)), None)

    @torch.no_grad()
    def update(self, data: Sample) -> Update:
        """One update of the critics, the policy, the temperature and the target critics. Raises NotFinite if
        the critics' loss is NaN or infinite, before any parameter changes."""
        self._update_statistics(data.observation)
        noise = self._noise.of(self._critic.clock)[:, : len(data.reward)]
        alpha = self._temperature.log_alpha.detach().exp()
        observation = self.policy.observation_features(data.observation)
        next_observation = self.policy.observation_features(data.next_observation)
        draw, next_draw = self._draw(observation, next_observation, noise)
        target = self._target(data, next_observation, next_draw, alpha)
        scaled = self.policy.bounds.to_scaled(data.action)
        activations = self._critic_passes.forward(self._critic_input(observation, scaled))
        q = activations[-1][..., 0]
        squared = squared_error(q, target, data.weights)
        check_loss(squared.loss, "critic", self._critic.clock)
        self._critic_passes.backward(activations, squared.slope[..., None])
        exchange = self._critic.follow(self._critic.grad)
        self._update_policy(observation, draw, alpha)
        log_probability = draw.drawn.log_probability
        if "temperature" in self.replicas:
            replica = self.replicas["temperature"]
            replica.follow(temperature_slope(log_probability, self._target_entropy).view(1))
        self.target.after_update(exchange.staleness, self._critic.common_rounds)
        error = squared.error.abs().mean(0)
        metrics: dict[str, Metric] = {
            "loss": squared.loss,
            "q_mean": q.mean,
            "td_error": error.mean,
            "temperature": alpha.sum,  # alpha has one element
            "entropy": lambda: -log_probability.mean(),
        }
        return Update(metrics, error)

    def _draw(self, observation: Tensor, next_observation: Tensor, noise: Tensor) -> tuple[_Draw, Squashed]:
        """The draws of the present policy at s and at s', with the noise [2, B, D] at s' and s.

        The policy does not change between its two uses in an update: one pass is faster than two.
        """
        size = len(observation)
        activations = self._policy_passes.forward(torch.cat([next_observation, observation])[None])
        mean, unlimited_log_std = activations[-1][0].chunk(2, 1)
        log_std = limited_log_std(unlimited_log_std)
        noise = noise.flatten(0, 1)
        drawn = squashed_gaussian(mean, log_std, noise)
        draw = _Draw(
            Squashed(drawn.action[size:], drawn.log_probability[size:]),
            self._policy_passes.rows(activations, slice(size, None)),
            unlimited_log_std[size:],
            log_std[size:],
            noise[size:],
        )
        return draw, Squashed(drawn.action[:size], drawn.log_probability[:size])

    def _target(self, data: Sample, next_observation: Tensor, drawn: Squashed, alpha: Tensor) -> Tensor:
        """y [B], from the target critics at actions drawn from the present policy."""
        values = self._target_passes.forward(self._critic_input(next_observation, drawn.action))[-1]
        return soft_target(data.reward, data.discount, values[..., 0], drawn.log_probability, alpha)

    def _update_policy(self, observation: Tensor, draw: _Draw, alpha: Tensor) -> None:
        """One step down the gradient of ``mean(alpha log pi(a | s) - min_e Q_e(s, a))``."""
        critic_activations = self._critic_passes.forward(self._critic_input(observation, draw.drawn.action))
        # each row follows the critic with the smaller value
        q, actions = critic_activations[-1], slice(observation.shape[1], None)
        chosen = (q[1, :, 0] < q[0, :, 0]).to(torch.int64)
        if q.is_cuda:  # whole passes, with weights 1 and 0: to select rows would wait for the device
            weights = torch.stack([1 - chosen, chosen]).to(q.dtype)[..., None]
            q_slope = self._critic_passes.input_slope(critic_activations, weights, inputs=actions).sum(0)
        else:
            q_slope = self._critic_passes.slope_of_chosen(critic_activations, chosen, actions)
        slope = soft_policy_slope(draw.drawn.action, draw.log_std, draw.noise, q_slope, alpha)
        output_slope = torch.cat([slope.mean, through_limit(slope.log_std, draw.unlimited_log_std)], 1)
        self._policy_passes.backward(draw.activations, output_slope[None])
        self._policy.follow(self._policy.grad)

    def _critic_input(self, observation: Tensor, scaled: Tensor) -> Tensor:
        """The critics' input [2, B, F + D], one tensor for both."""
        joined = torch.cat([observation, scaled], 1)
        return joined.expand(2, *joined.shape)

    def state(self) -> dict[str, Any]:
        """The target critics; replicas save their own state."""
        return {"target": self.target.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.target.load(state["target"])
