"""A user's file of environments, good and bad ones."""

from __future__ import annotations

FILE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from own_neighbour import LIMIT

class Outer:
    class Inner(CartPoleEnv):
        pass

def make_env():
    return gymnasium.wrappers.TransformReward(gymnasium.wrappers.TimeLimit(CartPoleEnv(), LIMIT), lambda r: 3 * r)

def number():
    return 7

gymnasium.register("OwnCart-v0", CartPoleEnv, max_episode_steps=9)

def forgets():
    CartPoleEnv()

def fails():
    raise ArithmeticError("no")

class spaceless(gymnasium.Env):
    pass

class actless(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(2)
"""  # noqa: E501
