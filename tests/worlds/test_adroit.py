"""The Adroit hand: its rewards against those published, successes, and exact resumes."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from resuming import assert_resumes_exactly, drawn_actions, play, same_steps

from murmurate.errors import MissingExtra, Refusal
from murmurate.evaluation.games import EvalResult, Games
from murmurate.worlds import _adroit_env
from murmurate.worlds.adroit import AdroitWorld
from murmurate.worlds.registry import world, world_names

pytest.importorskip("gymnasium_robotics")


def _between(one: Any, other: Any) -> float:
    return math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(one, other, strict=True)))


def published(task: str, env: Any) -> float:
    """The dense rewards of the hand manipulation suite's version 0, from the names in its models."""
    data = env.data
    site, body, joint = (lambda name: data.site(name).xpos), (lambda name: data.body(name).xpos), data.joint
    palm = site("S_grasp")
    if task == "door":
        angle = float(joint("door_hinge").qpos[0])
        bonus = 2 * (angle > 0.2) + 8 * (angle > 1.0) + 10 * (angle > 1.35)
        speed = sum(float(v) ** 2 for v in data.qvel)
        return -0.1 * _between(palm, site("S_handle")) - 0.1 * (angle - 1.57) ** 2 - 1e-5 * speed + bonus
    thing = body("Object")
    if task == "hammer":
        head, nail, goal = site("tool"), site("S_target"), site("nail_goal")
        left = _between(nail, goal)
        speed = math.sqrt(sum(float(v) ** 2 for v in data.qvel))
        bonus = 2 * (thing[2] > 0.04 and head[2] > 0.04) + 25 * (left < 0.02) + 75 * (left < 0.01)
        return -0.1 * _between(palm, thing) - _between(head, nail) - 10 * left - 1e-2 * speed + bonus
    target = site("target")
    reward = -0.1 * _between(palm, thing)
    if thing[2] > 0.04:
        reward += 1 - 0.5 * _between(palm, target) - 0.5 * _between(thing, target)
    return reward + 10 * (_between(thing, target) < 0.1) + 20 * (_between(thing, target) < 0.05)


@pytest.mark.parametrize("task", ["door", "hammer", "relocate"])
def test_rewards_are_those_published(task: str) -> None:
    env = _adroit_env.make(task, 200)
    env.reset(seed=3)
    generator = np.random.default_rng(0)
    for t in range(40):
        if t == 20 and task == "door":
            env.unwrapped.data.joint("door_hinge").qpos[0] = 1.4
        if t == 20 and task == "relocate":
            env.unwrapped.data.joint("OBJTz").qpos[0] = 0.2
        reward = env.step(generator.uniform(-1, 1, env.action_space.shape).astype(np.float32))[1]
        assert reward == pytest.approx(published(task, env.unwrapped), abs=1e-9)


def test_the_sign_is_measured_and_another_term_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is added to the reward, the installed version is what a right, or an unknown, one is."""
    plain = _adroit_env._plain

    def altered(more: float) -> Any:
        class Altered:
            def __init__(self, name: str) -> None:
                self.inner = plain(name)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.inner, name)

            def step(self, action: Any) -> Any:
                seen, reward, *rest = self.inner.step(action)
                return seen, reward + more * _adroit_env.palm_distance("door", self.inner), *rest

        return Altered

    wrong = _adroit_env.factor.__wrapped__("door")
    assert wrong in (0.0, -0.2)
    monkeypatch.setattr(_adroit_env, "_plain", altered(wrong))
    assert _adroit_env.factor.__wrapped__("door") == 0.0
    monkeypatch.setattr(_adroit_env, "_plain", altered(wrong + 0.2))
    assert _adroit_env.factor.__wrapped__("door") == -0.2
    monkeypatch.setattr(_adroit_env, "_plain", altered(wrong - 0.4))
    with pytest.raises(Refusal, match=r"reward of adroit-door changes by -0.5.*gymnasium-robotics 1\.4\.2"):
        _adroit_env.factor.__wrapped__("door")


@pytest.mark.parametrize("task", _adroit_env.TASKS)
def test_it_resumes_bit_for_bit(task: str) -> None:
    assert assert_resumes_exactly(AdroitWorld(task, max_episode_steps=15), before=20, after=40) == 6


def test_served_it_plays_the_same_and_resumes_bit_for_bit() -> None:
    here, there = (AdroitWorld("pen", 12, served).open(2, training=True) for served in (False, True))
    assert torch.equal(here.reset(4).observation, there.reset(4).observation)
    for actions in drawn_actions(here.spec, 30, 2, seed=0):
        assert same_steps(play(here, actions), play(there, actions))
    there.close()
    assert_resumes_exactly(AdroitWorld("door", 9, served=True), before=13, after=20)


def test_an_episode_is_a_success_if_enough_of_its_steps_are_at_the_goal() -> None:
    for reached, success in ((25, False), (26, True)):
        simulators = AdroitWorld("door", max_episode_steps=40).open(1, training=False)
        simulators.reset(0)
        joint = simulators._envs[0].unwrapped.data.joint("door_hinge")  # type: ignore[attr-defined]
        for t in range(40):
            joint.qpos[0], joint.qvel[0] = (1.5 if t < reached else 0.0), 0.0
            step = play(simulators, torch.zeros(1, 28))
        (episode,) = step.episodes
        assert episode.success is success
        simulators.close()


def test_an_evaluation_tells_the_share_of_successes() -> None:
    result = EvalResult((1.0, 2.0, 3.0, 4.0), (5, 5, 5, 5), (True, False, True, True))
    assert result.success_rate == 0.75
    assert EvalResult((1.0, 2.0), (5, 5), (True, None)).success_rate is None
    assert EvalResult((1.0, 2.0), (5, 5)).success_rate is None
    figures = {"eval_return_mean": 2.5, "eval_return_stderr": None, "episodes": 4, "eval_success_rate": 0.75}
    assert Games().sentence(figures) == "Evaluation over 4 games: 2.50, 75% of them successful"


def test_names() -> None:
    assert {f"adroit-{task}" for task in _adroit_env.TASKS} <= set(world_names())
    assert world("adroit-hammer") == AdroitWorld("hammer")
    with pytest.raises(Refusal, match="Did you mean 'adroit-door'"):
        world("adroit-dor")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium_robotics", None)
    for served in (False, True):
        with pytest.raises(MissingExtra, match=r"gymnasium-robotics.*murmurate\[adroit\]"):
            AdroitWorld("pen", served=served).open(1, training=True)
