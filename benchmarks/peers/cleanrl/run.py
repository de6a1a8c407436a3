"""PPO on Pong with CleanRL's loop and hyper-parameters (see README.md); prints one JSON line with its
speed."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import ale_py
import gymnasium
import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

SIMULATORS, STEPS, MINIBATCHES, EPOCHS = 16, 128, 4, 4
DISCOUNT, LAMBDA, CLIP, ENTROPY, VALUE, NORM = 0.99, 0.95, 0.1, 0.01, 0.5, 0.5


def game() -> gymnasium.Env[Any, Any]:
    env = gymnasium.make("PongNoFrameskip-v4")
    env = gymnasium.wrappers.RecordEpisodeStatistics(env)
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, terminal_on_life_loss=True)
    env = gymnasium.wrappers.TransformReward(env, np.sign)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def layer(module: Any, gain: float = 2**0.5) -> Any:
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class Net(nn.Module):
    def __init__(self, kind: str, actions: int) -> None:
        super().__init__()
        if kind == "nature2013":
            sizes, flat, width = ((4, 16, 8, 4), (16, 32, 4, 2)), 32 * 81, 256
        else:
            sizes, flat, width = ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)), 64 * 49, 512
        layers: list[nn.Module] = []
        for size in sizes:
            layers += [layer(nn.Conv2d(*size)), nn.ReLU()]
        self.torso = nn.Sequential(*layers, nn.Flatten(), layer(nn.Linear(flat, width)), nn.ReLU())
        self.actor, self.critic = layer(nn.Linear(width, actions), 0.01), layer(nn.Linear(width, 1), 1.0)

    def forward(self, frames: Tensor) -> tuple[Categorical, Tensor]:
        hidden = self.torso(frames / 255.0)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


class PPO:
    def __init__(self, kind: str) -> None:
        gymnasium.register_envs(ale_py)
        self.games = gymnasium.vector.SyncVectorEnv([game] * SIMULATORS)
        self.net = Net(kind, int(self.games.single_action_space.n))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=2.5e-4, eps=1e-5)
        shape = (STEPS, SIMULATORS)
        self.frames = torch.zeros((*shape, 4, 84, 84))
        self.actions, self.log_probs, self.rewards, self.dones, self.values = (
            torch.zeros(shape) for _ in range(5)
        )
        observation, _ = self.games.reset(seed=1)
        self.now, self.done = torch.as_tensor(observation, dtype=torch.float32), torch.zeros(SIMULATORS)

    def iterate(self) -> None:
        self.collect()
        advantages = self.advantages()
        flat = [
            x.flatten(0, 1)
            for x in (self.frames, self.actions, self.log_probs, advantages, advantages + self.values)
        ]
        order, size = np.arange(STEPS * SIMULATORS), STEPS * SIMULATORS // MINIBATCHES
        for _ in range(EPOCHS):
            np.random.shuffle(order)
            for start in range(0, len(order), size):
                chosen = torch.as_tensor(order[start : start + size])
                self.update(*(x[chosen] for x in flat), self.values.flatten()[chosen])

    @torch.no_grad()
    def collect(self) -> None:
        for t in range(STEPS):
            self.frames[t], self.dones[t] = self.now, self.done
            policy, self.values[t] = self.net(self.now)
            action = policy.sample()
            self.actions[t], self.log_probs[t] = action, policy.log_prob(action)
            observation, reward, terminated, truncated, _ = self.games.step(action.numpy())
            self.rewards[t] = torch.as_tensor(reward, dtype=torch.float32)
            self.now = torch.as_tensor(observation, dtype=torch.float32)
            self.done = torch.as_tensor(terminated | truncated, dtype=torch.float32)

    @torch.no_grad()
    def advantages(self) -> Tensor:
        after, going = self.net(self.now)[1], 1.0 - self.done
        out, running = torch.zeros_like(self.rewards), torch.zeros(SIMULATORS)
        for t in reversed(range(STEPS)):
            delta = self.rewards[t] + DISCOUNT * after * going - self.values[t]
            running = delta + DISCOUNT * LAMBDA * going * running
            out[t], after, going = running, self.values[t], 1.0 - self.dones[t]
        return out

    def update(
        self, frames: Tensor, action: Tensor, before: Tensor, advantage: Tensor, target: Tensor, value: Tensor
    ) -> None:
        policy, now = self.net(frames)
        ratio = (policy.log_prob(action) - before).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        clipped = value + (now - value).clamp(-CLIP, CLIP)
        value_loss = 0.5 * torch.max((now - target) ** 2, (clipped - target) ** 2).mean()
        loss = policy_loss - ENTROPY * policy.entropy().mean() + VALUE * value_loss
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), NORM)
        self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", choices=("nature2013", "nature2015"), default="nature2013")
    parser.add_argument("--cpu-seconds", type=float, default=30.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = PPO(options.net)
    trainer.iterate()
    own = psutil.Process()
    steps, start, wall = 0, sum(own.cpu_times()[:2]), time.monotonic()
    while (spent := sum(own.cpu_times()[:2]) - start) < options.cpu_seconds:
        trainer.iterate()
        steps += STEPS * SIMULATORS
    result = {
        "trainer": "PPO loop with CleanRL's hyper-parameters, re-typed; each sample is used 4 times",
        "net": options.net,
        "simulators": SIMULATORS,
        "env_steps": steps,
        "cpu_seconds": round(spent, 3),
        "wall_seconds": round(time.monotonic() - wall, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
