"""Observations with a mask of legal actions, or with an image beside numbers: runs and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import murmurate

SHORT: dict[str, Any] = {"launcher": "inline", "simulators": 4, "eval_episodes": 2, "quiet": True}
REPLAY: dict[str, Any] = {"replay": {"learning_starts": 64, "capacity": 1000}}


class Keys(gymnasium.Env[Any, Any]):
    """Of six keys some fit, and the one with the highest number among these opens; illegal keys raise."""

    observation_space = spaces.Dict(
        {"action_mask": spaces.MultiBinary(6), "noise": spaces.Box(-1, 1, (2,), np.float32)}
    )
    action_space: Any = spaces.Discrete(6)
    illegal: ClassVar[int] = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        if not self.fits[self._number(action)]:
            Keys.illegal += 1
            raise ValueError(f"key {action} does not fit")
        reward = float(self._number(action) == np.flatnonzero(self.fits)[-1])
        self.steps += 1
        return self._observed(), reward, self.steps == 8, False, {}

    def _number(self, action: Any) -> int:
        return int(action)

    def _observed(self) -> Any:
        self.fits = self.np_random.random(6) < 0.4
        self.fits[self.np_random.integers(6)] = True
        return {
            "action_mask": self.fits.astype(np.int8),
            "noise": self.np_random.uniform(-1, 1, 2).astype(np.float32),
        }


class Pairs(Keys):
    """A key is a pair of numbers."""

    observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(5)})
    action_space = spaces.MultiDiscrete([2, 3])

    def step(self, action: Any) -> Any:
        if not (self.fits[action[0]] and self.fits[2 + action[1]]):
            Keys.illegal += 1
            raise ValueError(f"key {action} does not fit")
        self.steps += 1
        return self._observed(), float(action[0]), self.steps == 8, False, {}

    def _observed(self) -> Any:
        fits = self.np_random.integers(1, 4), self.np_random.integers(1, 8)  # bits, of which one is set
        self.fits = np.array([fits[0] & 1, fits[0] & 2, fits[1] & 1, fits[1] & 2, fits[1] & 4]) > 0
        return {"action_mask": self.fits.astype(np.int8)}


AGENTS: dict[str, dict[str, Any]] = {
    "a2c": {"updates": 20},
    "ppo": {"updates": 20, "agent": {"steps": 16, "minibatches": 2}},
    "impala": {"updates": 20, "actors": 0},
    "trpo": {"updates": 40, "agent": {"steps": 16, "value_minibatches": 2, "value_epochs": 2}},
    "arm": {"updates": 40, "collect_env_steps": 64, "minibatches": 20},
    "dqn": {"updates": 40, **REPLAY},
}


@pytest.fixture(autouse=True)
def no_key_that_does_not_fit() -> Any:
    Keys.illegal = 0
    yield
    assert Keys.illegal == 0


@pytest.mark.parametrize("algorithm", AGENTS)
def test_no_agent_takes_an_illegal_action(algorithm: str, tmp_path: Path) -> None:
    result = murmurate.train(
        env=Keys, algorithm=algorithm, out=tmp_path / "run", **SHORT, **AGENTS[algorithm]
    )
    assert result.code == 0
    assert result.summary["updates"] >= 20
    assert result.summary["eval_return_mean"] >= 1.0


@pytest.mark.parametrize("algorithm", ["a2c", "ppo"])
@pytest.mark.parametrize("joint", [0, 1024])
def test_each_part_of_an_action_has_a_mask(algorithm: str, joint: int, tmp_path: Path) -> None:
    settings = {"env": Pairs, "algorithm": algorithm, "out": tmp_path / "run", **SHORT, **AGENTS[algorithm]}
    if joint:
        with pytest.raises(murmurate.Refusal, match="joint-actions"):
            murmurate.train(**settings)
        return
    assert murmurate.train(world={"joint_actions": 0}, **settings).code == 0


def test_random_env_steps_and_recurrent_and_stacked_agents_keep_to_the_mask(tmp_path: Path) -> None:
    common = {"env": Keys, **SHORT}
    dqn = murmurate.train(
        algorithm="dqn", updates=4, random_env_steps=64, out=tmp_path / "dqn", **common, **REPLAY
    )
    lstm = murmurate.train(
        algorithm="a2c", updates=4, agent={"recurrent": 8}, out=tmp_path / "lstm", **common
    )
    stack = murmurate.train(
        algorithm="a2c", updates=4, world={"frame_stack": 3}, out=tmp_path / "stack", **common
    )
    assert (dqn.code, lstm.code, stack.code) == (0, 0, 0)


def test_arm_keeps_to_the_mask_off_policy_and_greedily(tmp_path: Path) -> None:
    settings = AGENTS["arm"] | {"keep_batches": 2, "agent": {"importance_clip": 1.0, "evaluate": "greedy"}}
    result = murmurate.train(env=Keys, algorithm="arm", out=tmp_path / "run", **SHORT, **settings)
    assert result.code == 0
    assert murmurate.load(result.folder).export(tmp_path / "policy.pt2").max_error < 1e-2


def make_keys(num_envs: int) -> Any:
    return gymnasium.vector.SyncVectorEnv(
        [Keys] * num_envs, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )


@pytest.mark.parametrize(
    ("env", "algorithm", "settings"),
    [
        (Keys, "apex-dqn", {"actors": 1, "random_env_steps": 32, "updates": 4, **REPLAY}),
        (Keys, "a2c", {"world": {"served": True}, "updates": 8}),
        (make_keys, "a2c", {"updates": 8}),
    ],
)
def test_actors_and_served_and_vector_environments_keep_to_the_mask(
    env: Any, algorithm: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    result = murmurate.train(
        env=env, algorithm=algorithm, out=tmp_path / "run", **SHORT | {"launcher": "local"}, **settings
    )
    assert result.code == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not any(record.get("simulator_restarts") for record in records)


def trained_by_ppo(env: Any, agent: dict[str, Any], env_steps: int, out: Path) -> murmurate.Result:
    return murmurate.train(
        env=env,
        algorithm="ppo",
        agent={"steps": 32, "minibatches": 4, **agent},
        env_steps=env_steps,
        out=out,
        **SHORT | {"simulators": 8, "eval_episodes": 50},
    )


def test_ppo_learns_which_legal_action_is_best(tmp_path: Path) -> None:
    result = trained_by_ppo(Keys, {"learning_rate": 3e-3}, 12_000, tmp_path / "run")
    assert result.summary["eval_return_mean"] > 7.5  # of 8; legal keys at random give 8 / 3
    model = murmurate.load(result.folder)
    fits = np.array([1, 0, 1, 0, 1, 0], np.int8)
    observation = {"action_mask": fits, "noise": np.zeros(2, np.float32)}
    assert model.act(observation) == 4
    model.export(tmp_path / "policy.pt2")
    program = torch.export.load(tmp_path / "policy.pt2").module()
    action, logits, *_ = program(torch.tensor([[1.0, 0, 1, 0, 1, 0, 0, 0]]))
    assert action.tolist() == [4]
    assert (logits[0, 1::2] <= -1e8).all()


class Lamp(gymnasium.Env[Any, Any]):
    """The brighter half of the picture is the side to choose, on the other side where the flag is set."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (24, 24, 3), np.uint8),
            "flag": spaces.Box(0, 1, (1,), np.float32),
        }
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        reward = float(int(action) == self.side ^ self.flag)
        self.steps += 1
        return self._observed(), reward, self.steps == 8, False, {}

    def _observed(self) -> Any:
        self.side, self.flag = (int(x) for x in self.np_random.integers(2, size=2))
        picture = self.np_random.integers(0, 60, (24, 24, 3), dtype=np.uint8)
        picture[:, 12 * self.side : 12 * (self.side + 1)] += 150
        return {"camera": picture, "flag": np.array([self.flag], np.float32)}


def test_an_image_beside_a_number_is_learned_from_and_exported(tmp_path: Path) -> None:
    result = trained_by_ppo(
        Lamp,
        {
            "epochs": 4,
            "learning_rate": 1e-3,
            "hidden": 32,
        },
        16_000,
        tmp_path / "run",
    )
    assert result.summary["eval_return_mean"] > 7.5  # of 8; either part alone gives 4
    model = murmurate.load(result.folder)
    lamp = Lamp()
    observation, _ = lamp.reset(seed=1)
    assert model.act(observation) == lamp.side ^ lamp.flag
    assert model.export(tmp_path / "policy.pt2").max_error < 1e-4
    assert model.export(tmp_path / "policy.onnx").max_error < 1e-4
    model.export(tmp_path / "weights.safetensors")
    from safetensors import safe_open

    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["murmurate"])
    pixels = 24 * 24 * 3
    assert metadata["observation_parts"] == [
        ["camera", 0, pixels, [3, 24, 24]],
        ["flag", pixels, pixels + 1, []],
    ]


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("dqn", {"updates": 6, **REPLAY}),
        ("impala", {"updates": 4, "actors": 0}),
        ("arm", AGENTS["arm"] | {"updates": 4}),
    ],
)
def test_other_agents_read_images_beside_numbers(
    algorithm: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    result = murmurate.train(
        env=Lamp, algorithm=algorithm, world={"frame_stack": 2}, out=tmp_path / "run", **SHORT, **settings
    )
    assert result.code == 0


class Arm(Lamp):
    action_space: Any = spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action: Any) -> Any:
        return super().step(action[0] > 0)


@pytest.mark.parametrize("algorithm", ["sac", "td3", "d4pg"])
def test_agents_of_vectors_refuse_images_beside_numbers(algorithm: str, tmp_path: Path) -> None:
    with pytest.raises(murmurate.Refusal, match=r"camera.*--world\.observe"):
        murmurate.train(env=Arm, algorithm=algorithm, updates=4, out=tmp_path / "run", **SHORT, **REPLAY)
    assert not (tmp_path / "run").exists()
