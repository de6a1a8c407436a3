"""A whole run of Stable-Baselines3.

``python -m murmurate.bench._sb3_learning td3|sac ID ENV_STEPS RANDOM_ENV_STEPS GAMES SEED FILE`` trains with
the settings of our recipes ``<world>-td3`` and ``<world>-sac``: two layers of 256 units, Adam at 3e-4,
batches of 256, an update per env step after the random env steps. FILE gets the mean return of the greedy
games.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gymnasium
import torch


def main(
    algorithm: str, env_id: str, env_steps: int, random_env_steps: int, games: int, seed: int, file: Path
) -> None:
    torch.set_num_threads(1)
    import numpy as np
    from stable_baselines3 import SAC, TD3
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.noise import NormalActionNoise

    env = gymnasium.make(env_id)
    shape = env.action_space.shape
    assert shape is not None
    noise = NormalActionNoise(np.zeros(shape), np.full(shape, 0.1)) if algorithm == "td3" else None
    learner = {"td3": TD3, "sac": SAC}[algorithm](
        "MlpPolicy",
        env,
        buffer_size=min(env_steps, 1_000_000),
        batch_size=256,
        learning_starts=random_env_steps,
        train_freq=1,
        gradient_steps=1,
        learning_rate=3e-4,
        policy_kwargs={"net_arch": [256, 256]},
        action_noise=noise,
        seed=seed,
        device="cpu",
    )
    learner.learn(env_steps)
    mean, _ = evaluate_policy(learner, gymnasium.make(env_id), n_eval_episodes=games)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"eval_return_mean": mean, "env_steps": env_steps}))


if __name__ == "__main__":
    algorithm, env_id, *numbers, file = sys.argv[1:]
    env_steps, random_env_steps, games, seed = map(int, numbers)
    main(algorithm, env_id, env_steps, random_env_steps, games, seed, Path(file))
