"""Stable-Baselines3 as a racer: ``python -m murmurate.bench._sb3 WORLD SIMULATORS FILE``, where WORLD is
pong, cartpole, pong-dqn, halfcheetah-td3 or halfcheetah-sac.

A2C has the defaults of Stable-Baselines3 (5 steps, RMSprop at 7e-4), on CartPole our recipe's 8 steps and
GAE; DQN has batches of 32 and draws each transition 8 times, as our recipe does. There is one torch thread,
and all simulators run in this process, which is faster here than a process for each. On Pong the net is the
same as ours (16 filters 8x8/4, 32 filters 4x4/2, 256 units), given as a features extractor, and the entropy
bonus is 0.01. On HalfCheetah, TD3 and SAC have one simulator, two layers of 256 units, batches of 256 and an
update per env step, after 1,000 random env steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import torch
from torch import nn

from murmurate.bench._racer import ProgressFile


def main(world: str, simulators: int, progress: Path) -> None:
    torch.set_num_threads(1)
    from stable_baselines3.common.callbacks import BaseCallback

    class Callback(BaseCallback):
        """Ends the run when the benchmark has ended."""

        def __init__(self) -> None:
            super().__init__()
            self.file = ProgressFile(progress)

        def _on_step(self) -> bool:
            return self.file.write(self.num_timesteps)

    learner(world, simulators).learn(1_000_000_000, callback=Callback())


def learner(world: str, simulators: int) -> Any:
    from stable_baselines3 import A2C, DQN, SAC, TD3
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    if world == "cartpole":
        carts = make_vec_env("CartPole-v1", simulators, seed=0)
        return A2C("MlpPolicy", carts, n_steps=8, gae_lambda=0.95, seed=0, device="cpu")
    if world.startswith("halfcheetah"):
        algorithm = TD3 if world.endswith("td3") else SAC
        return algorithm(
            "MlpPolicy",
            gymnasium.make("HalfCheetah-v5"),
            buffer_size=200_000,
            batch_size=256,
            learning_starts=1_000,
            train_freq=1,
            gradient_steps=1,
            learning_rate=3e-4,
            policy_kwargs={"net_arch": [256, 256]},
            seed=0,
            device="cpu",
        )
    import ale_py

    gymnasium.register_envs(ale_py)
    games = VecFrameStack(make_atari_env("PongNoFrameskip-v4", simulators, seed=0), 4)
    policy_options = {
        "features_extractor_class": extractor(),
        "features_extractor_kwargs": {"features_dim": 256},
        "net_arch": [],
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if world == "pong-dqn":
        return DQN(
            "CnnPolicy",
            games,
            buffer_size=20_000,
            learning_starts=1_000,
            batch_size=32,
            train_freq=max(1, 4 // simulators),
            gradient_steps=max(1, simulators // 4),
            # else it would act at random, without a forward pass, for a tenth of the run, which never ends
            exploration_fraction=1e-9,
            policy_kwargs=policy_options,
            seed=0,
            device=device,
        )
    return A2C("CnnPolicy", games, ent_coef=0.01, policy_kwargs=policy_options, seed=0, device=device)


def extractor() -> type[nn.Module]:
    """The Nature-2013 torso as a features extractor of Stable-Baselines3."""
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Nature2013(BaseFeaturesExtractor):
        def __init__(self, observation_space: gymnasium.spaces.Box, features_dim: int) -> None:
            super().__init__(observation_space, features_dim)
            channels, height, width = observation_space.shape
            convolutions = nn.Sequential(
                nn.Conv2d(channels, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten()
            )
            with torch.no_grad():
                flat = convolutions(torch.zeros(1, channels, height, width)).shape[1]
            self.net = nn.Sequential(convolutions, nn.Linear(flat, features_dim), nn.ReLU())

        def forward(self, observations: torch.Tensor) -> torch.Tensor:
            features: torch.Tensor = self.net(observations)
            return features

    return Nature2013


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
