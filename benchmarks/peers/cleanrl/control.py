"""TD3 or SAC on HalfCheetah with CleanRL's loops and hyper-parameters (see README.md), for ``murmurate bench
control-throughput``.

``control.py td3|sac FILE`` appends the number of env steps, each with one update, to FILE.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LINE_SECONDS = 0.5
Act = Callable[[Tensor], Tensor]
Update = Callable[[list[Tensor], int], None]
BATCH, START, DISCOUNT, TAU, HIDDEN, CAPACITY = 256, 1_000, 0.99, 0.005, 256, 200_000


class Buffer:
    """Rows of numpy arrays, drawn uniformly and made into tensors, as in CleanRL's replay buffer."""

    def __init__(self, observed: int, actions: int) -> None:
        self.arrays = [
            np.zeros((CAPACITY, width), np.float32) for width in (observed, actions, observed, 1, 1)
        ]
        self.place = self.size = 0

    def add(self, *values: Any) -> None:
        for array, value in zip(self.arrays, values, strict=True):
            array[self.place] = value
        self.place = (self.place + 1) % CAPACITY
        self.size = min(self.size + 1, CAPACITY)

    def sample(self) -> list[Tensor]:
        rows = np.random.randint(0, self.size, BATCH)
        return [torch.as_tensor(array[rows]) for array in self.arrays]


class Critic(nn.Module):
    def __init__(self, observed: int, actions: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(observed + actions, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, HIDDEN)
        self.fc3 = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        x = F.relu(self.fc1(torch.cat([x, a], 1)))
        return self.fc3(F.relu(self.fc2(x)))


class Actor(nn.Module):
    def __init__(self, observed: int, actions: int, gaussian: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(observed, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, HIDDEN)
        self.mean = nn.Linear(HIDDEN, actions)
        self.log_std = nn.Linear(HIDDEN, actions) if gaussian else None

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        if self.log_std is None:
            return torch.tanh(self.mean(x))
        log_std = -5 + 0.5 * 7 * (torch.tanh(self.log_std(x)) + 1)
        return self.mean(x), log_std

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self(x)
        normal = torch.distributions.Normal(mean, log_std.exp())
        u = normal.rsample()
        y = torch.tanh(u)
        log_prob = normal.log_prob(u) - torch.log(1 - y.pow(2) + 1e-6)
        return y, log_prob.sum(1, keepdim=True)


def follow(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.data.copy_(TAU * source.data + (1 - TAU) * target.data)


def td3(observed: int, actions: int) -> tuple[Act, Update]:
    actor, q1, q2 = Actor(observed, actions, False), Critic(observed, actions), Critic(observed, actions)
    target_actor = Actor(observed, actions, False)
    t1, t2 = Critic(observed, actions), Critic(observed, actions)
    for target, net in ((target_actor, actor), (t1, q1), (t2, q2)):
        target.load_state_dict(net.state_dict())
    q_optimizer = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=3e-4)
    actor_optimizer = torch.optim.Adam(list(actor.parameters()), lr=3e-4)

    def act(x: Tensor) -> Tensor:
        a = actor(x)
        return (a + torch.normal(0, torch.full_like(a, 0.1))).clamp(-1, 1)

    def update(batch: list[Tensor], step: int) -> None:
        x, a, x_next, reward, over = batch
        with torch.no_grad():
            noise = (torch.randn_like(a) * 0.2).clamp(-0.5, 0.5)
            a_next = (target_actor(x_next) + noise).clamp(-1, 1)
            least = torch.min(t1(x_next, a_next), t2(x_next, a_next))
            y = reward.flatten() + (1 - over.flatten()) * DISCOUNT * least.view(-1)
        loss = F.mse_loss(q1(x, a).view(-1), y) + F.mse_loss(q2(x, a).view(-1), y)
        q_optimizer.zero_grad()
        loss.backward()
        q_optimizer.step()
        if step % 2 == 0:
            actor_loss = -q1(x, actor(x)).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
            follow(target_actor.parameters(), actor.parameters())
            follow(t1.parameters(), q1.parameters())
            follow(t2.parameters(), q2.parameters())

    return act, update


def sac(observed: int, actions: int) -> tuple[Act, Update]:
    actor, q1, q2 = Actor(observed, actions, True), Critic(observed, actions), Critic(observed, actions)
    t1, t2 = Critic(observed, actions), Critic(observed, actions)
    for target, net in ((t1, q1), (t2, q2)):
        target.load_state_dict(net.state_dict())
    q_optimizer = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=1e-3)
    actor_optimizer = torch.optim.Adam(list(actor.parameters()), lr=3e-4)
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=1e-3)

    def act(x: Tensor) -> Tensor:
        return actor.draw(x)[0]

    def update(batch: list[Tensor], step: int) -> None:
        x, a, x_next, reward, over = batch
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            a_next, log_next = actor.draw(x_next)
            least = torch.min(t1(x_next, a_next), t2(x_next, a_next)) - alpha * log_next
            y = reward.flatten() + (1 - over.flatten()) * DISCOUNT * least.view(-1)
        loss = F.mse_loss(q1(x, a).view(-1), y) + F.mse_loss(q2(x, a).view(-1), y)
        q_optimizer.zero_grad()
        loss.backward()
        q_optimizer.step()
        if step % 2 == 0:  # delayed, and made up for by as many updates
            for _ in range(2):
                pi, log_pi = actor.draw(x)
                actor_loss = (alpha * log_pi - torch.min(q1(x, pi), q2(x, pi))).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
                with torch.no_grad():
                    _, log_pi = actor.draw(x)
                alpha_loss = (-log_alpha.exp() * (log_pi - actions)).mean()
                alpha_optimizer.zero_grad()
                alpha_loss.backward()
                alpha_optimizer.step()
                alpha = log_alpha.exp().item()
        follow(t1.parameters(), q1.parameters())
        follow(t2.parameters(), q2.parameters())

    return act, update


def main(name: str, path: Path) -> None:
    torch.set_num_threads(1)
    envs = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("HalfCheetah-v5"))]
    )
    observed, actions = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    act, update = {"td3": td3, "sac": sac}[name](observed, actions)
    buffer = Buffer(observed, actions)
    x, _ = envs.reset(seed=0)
    bench, written_at, step, ended = os.getppid(), time.monotonic(), 0, False
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", buffering=1) as file:
        while os.getppid() == bench:
            step += 1
            if step <= START:
                action = envs.action_space.sample()
            else:
                with torch.no_grad():
                    action = act(torch.as_tensor(x, dtype=torch.float32)).numpy()
            x_next, reward, terminated, truncated, _ = envs.step(action)
            if not ended:  # else this step was the reset
                buffer.add(x[0], action[0], x_next[0], reward[0], terminated[0])
            x, ended = x_next, bool(terminated[0] or truncated[0])
            if step > START:
                update(buffer.sample(), step)
            if time.monotonic() - written_at > _LINE_SECONDS:
                written_at = time.monotonic()
                file.write(json.dumps({"env_steps": step}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
