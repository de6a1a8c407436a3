"""The DeepMind Control Suite against itself, from states and from pixels, and exact resumes."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from resuming import assert_resumes_exactly, drawn_actions, play, same_steps

from murmurate.cli.options import options
from murmurate.errors import MissingExtra, Refusal
from murmurate.spec import EnvSpec
from murmurate.worlds import _dmc_env
from murmurate.worlds.dm_control import DmcWorld
from murmurate.worlds.env_state import Unsavable
from murmurate.worlds.generators import simulator_seed
from murmurate.worlds.registry import world, world_names

pytest.importorskip("dm_control")
suite = _dmc_env.suite(pictures=False)
STATES = DmcWorld("cheetah", "run")
PIXELS = DmcWorld("cartpole", "swingup", pixels=True, action_repeat=8)


def alone(domain: str, task: str, seed: int) -> Any:
    """A task of the suite with the seed of one simulator."""
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(simulator_seed(seed, 0))))
    return suite.load(domain, task, task_kwargs={"random": random})


def flat(step: Any) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.ravel(v) for v in step.observation.values()])).float()


@pytest.mark.parametrize(("domain", "task", "repeat"), [("cheetah", "run", 1), ("hopper", "hop", 4)])
def test_from_states_it_is_the_suite_with_its_time_limit_as_truncation(
    domain: str, task: str, repeat: int
) -> None:
    simulators = DmcWorld(domain, task, action_repeat=repeat).open(1, training=True)
    env = alone(domain, task, seed=7)
    assert torch.equal(simulators.reset(7).observation[0], flat(env.reset()))
    total, count = 0.0, -(-1000 // repeat)
    for t, action in enumerate(drawn_actions(simulators.spec, count, 1, seed=0)):
        step = play(simulators, action)
        reward = 0.0
        for _ in range(repeat):
            theirs = env.step(np.clip(action[0].numpy(), -1, 1))
            reward += theirs.reward
        total += reward
        assert step.reward[0] == np.float32(reward)
        assert not step.terminated.any()
        assert step.truncated.item() == (t == count - 1) == theirs.last()
        seen = step.observation if step.final_observation is None else step.final_observation
        assert torch.equal(seen[0], flat(theirs))
    (episode,) = step.episodes
    assert (episode.episode_return, episode.length) == (pytest.approx(total), count)
    assert simulators.spec.frames_per_step == repeat


def test_what_mujoco_warns_of_in_the_suites_models_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    STATES.open(1, training=True).close()  # a setting of the model is deprecated
    assert not caplog.records


def test_an_end_within_a_repeated_action_ends_it() -> None:
    """Three does not divide the thousand steps of an episode; the last action lasts one."""
    simulators = DmcWorld("pendulum", "swingup", action_repeat=3).open(1, training=True)
    simulators.reset(0)
    ends = [int(play(simulators, torch.zeros(1, 1)).truncated) for _ in range(334 + 334)]
    assert [t for t, end in enumerate(ends) if end] == [333, 667]


def test_its_own_limit_counts_actions_and_not_their_steps() -> None:
    world = DmcWorld("pendulum", "swingup", action_repeat=5, max_episode_steps=4)
    simulators = world.open(1, training=True)
    simulators.reset(0)
    assert [bool(play(simulators, torch.zeros(1, 1)).truncated) for _ in range(5)] == [
        *[False] * 3,
        True,
        False,
    ]
    about = next(option.about for option in options(world) if option.name == "max-episode-steps")
    assert about.startswith("number of actions after which")


def test_an_early_end_terminates(monkeypatch: pytest.MonkeyPatch) -> None:
    env = _dmc_env.DmcEnv("cartpole", "balance", False, 4, 84, 0, False)
    env.reset(seed=0)
    monkeypatch.setattr(env.env.task, "get_termination", lambda physics: 0.0)
    _, reward, terminated, truncated, _ = env.step(np.zeros(1))
    assert (terminated, truncated) == (True, False)
    assert 0 < reward <= 1, "one step, not four"


@pytest.mark.parametrize(
    ("domain", "task"),
    [("cheetah", "run"), ("finger", "turn_hard")],
)
def test_from_states_it_resumes_bit_for_bit(domain: str, task: str) -> None:
    chosen = DmcWorld(domain, task, action_repeat=40)
    assert assert_resumes_exactly(chosen, before=13, after=14) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("domain", "task"), [pair for pair in suite.ALL_TASKS if pair[0] != "lqr"])
def test_every_task_resumes_bit_for_bit(domain: str, task: str) -> None:
    """All but those whose actions have no bounds."""
    assert_resumes_exactly(DmcWorld(domain, task, action_repeat=10), before=13, after=120)


def drawn() -> None:
    try:
        _dmc_env.suite(pictures=True)
    except Refusal as problem:
        pytest.skip(str(problem))


def test_from_pixels_it_shows_the_suites_pictures() -> None:
    drawn()
    simulators = PIXELS.open(1, training=True, picture=True)
    spec = simulators.spec
    assert spec == EnvSpec(
        "dmc-cartpole-swingup-pixels", (9, 84, 84), torch.uint8, 0, (1,), frames_per_step=8, stacked=True,
        channels=3,
    )  # fmt: skip
    env = alone("cartpole", "swingup", seed=7)
    env.reset()
    start = simulators.reset(7).observation
    pictures = [env.physics.render(84, 84, camera_id=0)] * 3
    for action in drawn_actions(spec, 12, 1, seed=0):
        step = play(simulators, action)
        reward = sum(env.step(np.clip(action[0].numpy(), -1, 1)).reward for _ in range(8))
        assert step.reward[0] == np.float32(reward)
        pictures.append(env.physics.render(84, 84, camera_id=0))
    shown = step.observation[0].view(3, 3, 84, 84).permute(0, 2, 3, 1)
    theirs = np.stack(pictures[-3:])
    assert np.abs(shown.numpy().astype(int) - theirs).mean() < 1.0, "of 255: other shadows, no other scene"
    assert np.abs(start.numpy()[0, :3].astype(int) - theirs[0].transpose(2, 0, 1)).mean() > 0.5
    assert simulators.picture().shape == (240, 320, 3)
    simulators.close()


def test_pictures_are_those_of_a_new_camera_and_are_not_overwritten() -> None:
    drawn()
    env = _dmc_env.DmcEnv("cartpole", "swingup", True, 20, 84, 0, True)
    first, picture = env.reset(seed=0)[0], env.render()
    kept = first.copy(), picture.copy()
    for _ in range(3):
        last = env.step(np.ones(1, np.float32))[0]
    assert (last != first).any()
    assert (last == env.physics.render(84, 84, camera_id=0).transpose(2, 0, 1)).all()
    assert (env.render() == env.physics.render(240, 320, camera_id=0)).all()
    assert (first == kept[0]).all()
    assert (picture == kept[1]).all()
    env.close()


def test_pictures_may_be_larger_than_the_suites_usual_ones() -> None:
    drawn()
    env = _dmc_env.DmcEnv("cartpole", "swingup", True, 1, 700, 0, False)
    assert env.reset(seed=0)[0].shape == (3, 700, 700)


def test_a_camera_that_is_not_there_is_refused() -> None:
    drawn()
    with pytest.raises(Refusal, match=r"no camera 99\. Choose with --world\.camera from 0 to 1\."):
        _dmc_env.DmcEnv("cartpole", "swingup", True, 1, 84, 99, False)


def test_from_pixels_it_resumes_bit_for_bit() -> None:
    drawn()
    chosen = dataclasses.replace(PIXELS, action_repeat=40)
    assert assert_resumes_exactly(chosen, before=20, after=10, size=1) == 1


def test_served_it_plays_the_same_and_resumes_bit_for_bit() -> None:
    served = DmcWorld("cheetah", "run", action_repeat=100, served=True)
    here, there = (
        DmcWorld("cheetah", "run", action_repeat=100).open(2, training=True),
        served.open(2, training=True),
    )
    assert torch.equal(here.reset(4).observation, there.reset(4).observation)
    for actions in drawn_actions(here.spec, 12, 2, seed=0):
        assert same_steps(play(here, actions), play(there, actions))
    saved = there.state()
    for actions in drawn_actions(here.spec, 5, 2, seed=1):
        play(there, actions)
    there.load(saved)
    for actions in drawn_actions(here.spec, 8, 2, seed=2):
        assert same_steps(play(here, actions), play(there, actions))
    there.close()


def test_physics_that_diverge_are_started_again() -> None:
    simulators = STATES.open(2, training=True)
    simulators.reset(0)
    simulators._envs[1].physics.data.qvel[:] = 1e30  # type: ignore[attr-defined]
    step = play(simulators, torch.zeros(2, 6))
    assert step.truncated.tolist() == [False, True]
    (message,) = step.restarts
    assert "dmc-cheetah-run (simulator 1, step 1 of its episode) raised PhysicsError" in message
    assert not play(simulators, torch.zeros(2, 6)).restarts


def test_landscapes_of_pictures_are_not_saved() -> None:
    drawn()
    env = _dmc_env.DmcEnv("quadruped", "escape", True, 1, 32, 2, False)
    with pytest.raises(Unsavable):
        env.saver().save()


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"dmc-cheetah-run", "dmc-cartpole-swingup-pixels", "dmc-ball-in-cup-catch"} <= set(world_names())
    assert world("dmc-cheetah-run") == STATES
    assert world("dmc-cartpole-swingup-pixels") == PIXELS
    for name in ("dmc-ball-in-cup-catch-pixels", "dmc-cartpole-swingup-sparse", "dmc-humanoid-CMU-run"):
        assert world(name).name == name, "listed or not"
    assert world("dmc-quadruped-walk-pixels").camera == 2
    with pytest.raises(Refusal, match=r"from states. Leave them out, or use dmc-cheetah-run-pixels"):
        DmcWorld("cheetah", "run", stack=4)
    with pytest.raises(Refusal, match="Did you mean 'dmc-walker-walk'"):
        world("dmc-walker-wlk")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for act in (lambda: world("dmc-cheetah-run"), lambda: STATES.open(1, training=True)):
        with pytest.raises(MissingExtra, match=r"dm_control.*murmurate\[control\]"):
            act()


@pytest.mark.parametrize("pictures", [True, False])
def test_where_nothing_draws_states_work_and_pictures_are_refused(pictures: bool) -> None:
    program = f"""
import sys
sys.modules["dm_control._render.pyopengl.egl_renderer"] = None
from murmurate.errors import Refusal
from murmurate.worlds._dmc_env import DmcEnv
try:
    DmcEnv("cheetah", "run", {pictures}, 1, 84, 0, False).reset(seed=0)
    print("works")
except Refusal as problem:
    print(problem)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    said = (
        "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri. Or install libosmesa6" if pictures else "works"
    )
    assert said in run.stdout, run.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_can_be_imported_after_a_task_was_opened() -> None:
    """Mesa, which draws, and Triton each bring an LLVM, and the second one crashes if it is Triton's."""
    code = (
        "import torch; from murmurate.worlds.registry import world; "
        "world('dmc-cartpole-swingup').open(1, training=True); import triton.runtime"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
