"""Worlds that a user's function or class makes: their names, and how they play and are evaluated."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from resuming import assert_resumes_exactly, play

from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.launch import launcher
from murmurate.recipes import recipe, relocated
from murmurate.record.reader import read_metrics
from murmurate.training.run_folder import plain, read_run, write_run
from murmurate.worlds import _own_env, registry
from murmurate.worlds.own import OwnWorld, replaced_by, world_of


def make_cart() -> gymnasium.Env[Any, Any]:
    return TimeLimit(CartPoleEnv(), 6)


def test_a_function_that_gives_the_same_environment_each_time_is_refused() -> None:
    """Its simulators would step and reset one another's episodes."""
    cart = CartPoleEnv()
    one = world_of(lambda: TimeLimit(cart, 6))
    one.open(1, training=True).close()
    with pytest.raises(Refusal, match=r"gives the same environment .* each of 2 simulators needs its own"):
        one.open(2, training=True)


def test_an_environment_in_place_of_what_makes_it_is_refused() -> None:
    with pytest.raises(Refusal, match="env is of type CartPoleEnv, and every simulator needs"):
        world_of(CartPoleEnv())  # type: ignore[arg-type]


def test_a_callable_is_named_by_its_module() -> None:
    made = world_of(make_cart)
    assert isinstance(made, OwnWorld)
    assert made.target == f"{__name__}:make_cart"
    assert made.bound_to_process() is None
    assert world_of(CartPoleEnv).target.endswith(":CartPoleEnv")  # type: ignore[attr-defined]
    assert assert_resumes_exactly(made, before=20, after=30) >= 4


class Walk(gymnasium.Env[Any, Any]):
    """A random walk that can be saved; ``path`` does not follow from the observation."""

    observation_space = gymnasium.spaces.Box(-99, 99, (1,), np.float32)
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.path = [0.0]
        return np.array(self.path[-1:], np.float32), {}

    def step(self, action: Any) -> Any:
        self.path.append(self.path[-1] + float(action.sum()) + float(self.np_random.normal()))
        return np.array(self.path[-1:], np.float32), sum(self.path), len(self.path) > 9, False, {}

    def save_state(self) -> Any:
        return {"path": self.path}

    def load_state(self, state: Any) -> None:
        self.path = state["path"]


def make_walk() -> gymnasium.Env[Any, Any]:
    return TimeLimit(gymnasium.wrappers.TransformReward(Walk(), lambda reward: reward / 2), 8)


@pytest.mark.parametrize("made", [Walk, make_walk])
def test_an_environment_that_can_be_saved_resumes_exactly(made: Any) -> None:
    plain_world = world_of(made)
    assert assert_resumes_exactly(plain_world, before=13, after=30) >= 4
    stacked = dataclasses.replace(plain_world, frame_stack=3)  # type: ignore[type-var]
    assert assert_resumes_exactly(stacked, before=13, after=30) >= 4


def test_a_lambda_is_for_this_process_alone(tmp_path: Path) -> None:
    def make() -> Any:
        return TimeLimit(CartPoleEnv(), 4)

    first, second = world_of(lambda: CartPoleEnv()), world_of(make)
    assert first != second
    assert world_of(make) == second
    run = recipe(f"{second.name}-a2c")
    assert run.world == second
    assert run.world.open(1, training=True).reset(0).observation.shape == (1, 4)
    assert plain(run)["world"]["target"] == second.target  # type: ignore[attr-defined]
    launcher("inline").check(run)
    with pytest.raises(Refusal, match=r"local launcher.*make is a lambda.*launcher inline"):
        launcher("local").check(run)
    with pytest.raises(Refusal, match="other processes cannot make"):
        pickle.dumps(second)
    with pytest.raises(Refusal, match=r"served is true.*launcher inline, without served"):
        dataclasses.replace(second, served=True).open(1, training=True)  # type: ignore[type-var]


def test_another_callable_stands_in_for_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, recipe(f"{world_of(lambda: CartPoleEnv()).name}-a2c"))
    monkeypatch.setattr(_own_env, "_callables", {})  # as in another process
    with pytest.raises(Refusal, match=r"murmurate.load\(folder, env=...\)"):
        read_run(tmp_path, recipe)
    with replaced_by(make_cart) as replacement:
        run = relocated(read_run(tmp_path, recipe), replacement)
    with pytest.raises(Refusal, match="only the process that began the run"):  # only for that one run
        read_run(tmp_path, recipe)
    simulators = run.world.open(1, training=True)  # type: ignore[attr-defined]
    simulators.reset(0)
    assert [bool(play(simulators, torch.tensor([t % 2])).truncated) for t in range(6)][-1]


def test_a_limit_and_a_history_of_ones_own(place: Path) -> None:
    made = dataclasses.replace(world_of(make_cart), max_episode_steps=3, frame_stack=2)  # type: ignore[type-var]
    for one in (made, dataclasses.replace(made, served=True)):
        simulators = one.open(1, training=True)
        simulators.reset(0)
        steps = [play(simulators, torch.tensor([t % 2])) for t in range(3)]
        assert [bool(step.truncated) for step in steps] == [False, False, True]
        assert steps[0].observation.shape == (1, 8)
        simulators.close()


def test_a_picture_needs_a_render_mode() -> None:
    with pytest.raises(Refusal, match="must take render_mode"):
        world_of(make_cart).open(1, training=False, picture=True)
    pytest.importorskip("pygame")
    drawn = world_of(CartPoleEnv).open(1, training=False, picture=True)
    drawn.reset(0)
    assert drawn.picture().dtype == np.uint8


def make_any(**options: Any) -> gymnasium.Env[Any, Any]:
    return CartPoleEnv(**options)


@pytest.mark.parametrize("function", [make_any, functools.partial(gymnasium.make, "CartPole-v1")])
def test_a_function_that_takes_any_argument_gets_the_render_mode(function: Any) -> None:
    pytest.importorskip("pygame")
    drawn = world_of(function).open(1, training=False, picture=True)
    drawn.reset(0)
    assert drawn.picture().shape == (400, 600, 3)
    drawn.close()


def make_shaped(training: bool) -> gymnasium.Env[Any, Any]:
    plain = make_cart()
    return gymnasium.wrappers.TransformReward(plain, lambda reward: 10 * float(reward)) if training else plain


def make_shaped_vector(num_envs: int, training: bool = False) -> Any:
    return SyncVectorEnv([lambda: make_shaped(training)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.parametrize(
    ("function", "served"), [(make_shaped, False), (make_shaped, True), (make_shaped_vector, False)]
)
def test_evaluations_are_without_what_a_function_does_for_training(function: Any, served: bool) -> None:
    shaped: Any = dataclasses.replace(cast(Any, world_of(function)), served=served)
    rewards = []
    for training in (True, False):
        simulators = shaped.open(1, training=training)
        simulators.reset(0)
        rewards.append(float(play(simulators, torch.tensor([0])).reward))
        simulators.close()
    assert rewards == [10.0, 1.0]


def test_a_run_is_evaluated_without_shaped_rewards_or_in_another_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shaping.py").write_text(
        "import gymnasium\n\n"
        "def make_env(training=True):\n"
        "    env = gymnasium.make('CartPole-v1', max_episode_steps=6)\n"
        "    scale = 100 if training else 1\n"
        "    return gymnasium.wrappers.TransformReward(env, lambda reward: scale * reward)\n\n"
        "def longer():\n"
        "    return gymnasium.make('CartPole-v1', max_episode_steps=7)\n"
    )
    out = ["--launcher", "inline", "--env-steps", "300", "--out", str(tmp_path / "run")]
    assert main(["train", "--env", f"{tmp_path / 'shaping.py'}:make_env", "--algorithm", "a2c", *out]) == 0
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [pair[0] for record in records for pair in record.get("episode_returns", ())][:2] == [600, 600]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval_return_mean"] == 6
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--env", f"{tmp_path / 'shaping.py'}:longer", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval_return_mean"] == 7


def test_videos_play_at_the_environments_own_speed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\n\n\n"
        "class Slow(CartPoleEnv):\n"
        '    metadata = {**CartPoleEnv.metadata, "render_fps": 4}\n'
    )
    assert registry.world(f"env:{tmp_path / 'slow.py'}:Slow").env_steps_per_second == 4
    assert registry.world("gym:CartPole-v1").env_steps_per_second == 50
    assert dataclasses.replace(registry.world("maze-l1"), frame_skip=4).env_steps_per_second == 5
