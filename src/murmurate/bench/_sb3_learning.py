"""A whole run of Stable-Baselines3.

``python -m murmurate.bench._sb3_learning SETTINGS FILE``: SETTINGS are the arguments of ``train`` as a JSON
object, and FILE gets the mean return of the greedy games.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gymnasium
import torch

_GAMES_SEED = 1_000_000  # added to the run's seed: the games are not those of its training


def train(
    *,
    algorithm: str,
    env_id: str,
    env_steps: int,
    random_env_steps: int,
    batch: int,
    rate: float,
    hidden: int,
    games: int,
    seed: int,
) -> float:
    """Train ``td3`` or ``sac`` with an update per env step after the random ones, and the mean return of the
    greedy games. rate: Adam's learning rate. hidden: width of the two layers of each net."""
    torch.set_num_threads(1)
    import numpy as np
    from stable_baselines3 import SAC, TD3
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = gymnasium.make(env_id)
    shape = env.action_space.shape
    assert shape is not None
    noise = NormalActionNoise(np.zeros(shape), np.full(shape, 0.1)) if algorithm == "td3" else None
    learner = {"td3": TD3, "sac": SAC}[algorithm](
        "MlpPolicy",
        env,
        buffer_size=min(env_steps, 1_000_000),
        batch_size=batch,
        learning_starts=random_env_steps,
        train_freq=1,
        gradient_steps=1,
        learning_rate=rate,
        policy_kwargs={"net_arch": [hidden, hidden]},
        action_noise=noise,
        seed=seed,
        device="cpu",
    )
    learner.learn(env_steps)
    unseen = DummyVecEnv([lambda: gymnasium.make(env_id)])
    unseen.seed(_GAMES_SEED + seed)
    mean, _ = evaluate_policy(learner, unseen, n_eval_episodes=games, warn=False)
    assert isinstance(mean, float)
    return mean


if __name__ == "__main__":
    settings, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    mean = train(**settings)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"eval_return_mean": mean, "env_steps": settings["env_steps"]}))
