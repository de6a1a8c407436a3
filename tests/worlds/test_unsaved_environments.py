"""Environments that cannot be saved or seeded as others, and the seeds of those in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from told import Told, wind

from murmurate.training import part_file
from murmurate.worlds import _failures
from murmurate.worlds._env_game import EnvGame
from murmurate.worlds.generators import simulator_seed
from murmurate.worlds.gym_simulators import GymSimulators
from murmurate.worlds.vector_simulators import VectorSimulators


class Seedless(Told):
    """Has another kind of generator than gymnasium's, and can be saved otherwise."""

    def __init__(self, generator: Any) -> None:
        super().__init__(wind)
        self._generator = generator

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.np_random = self._generator
        self.seed = seed
        return np.zeros(2, np.float32), {}

    def save_state(self) -> Any:
        return {}

    def load_state(self, state: Any) -> None:
        pass


def make_seedless() -> Seedless:
    return Seedless(np.random.RandomState(0))


@pytest.mark.parametrize(
    "generator", [np.random.RandomState(0), np.random.Generator(np.random.MT19937(0))], ids=["old", "MT19937"]
)
def test_another_kind_of_generator_is_not_saved_and_its_environment_replaced(generator: Any) -> None:
    simulators = GymSimulators("seedless", lambda b: (Seedless(generator), 10**6), 2, 3)
    seeds = []
    for _ in range(2):
        simulators.reset(1)
        assert simulators.state() is None
        for _ in range(2):
            simulators.send(torch.zeros(2, dtype=torch.int64))
            assert "KeyError" in simulators.receive().restarts[0]
            seeds.append([env.seed for env in simulators._envs])
    assert seeds[:2] == seeds[2:]
    assert len({seed for row in seeds[:2] for seed in row}) == 4


def test_a_served_environment_with_another_kind_of_generator_is_not_saved() -> None:
    game = EnvGame(f"{__name__}:make_seedless", {})
    game.begin(0, 0)
    assert game.state() is None


def test_replacements_after_a_resume_have_the_seeds_of_a_run_without_one() -> None:
    def opened() -> Any:
        return GymSimulators("told", lambda b: (Seedless(np.random.default_rng(0)), 10**6), 1, 0)

    def fail(simulators: Any) -> int:
        simulators.send(torch.zeros(1, dtype=torch.int64))
        simulators.receive()
        return int(simulators._envs[0].seed)

    one, other = opened(), opened()
    one.reset(5)
    fail(one)
    other.load(one.state())
    assert fail(one) == fail(other)


class Older(gymnasium.Env[Any, Any]):
    """Draws from NumPy's older generator, which takes seeds of 32 bits."""

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.drawn = np.random.RandomState(seed)
        return self.drawn.uniform(size=2), {}

    def step(self, action: Any) -> Any:
        return self.drawn.uniform(size=2), 1.0, False, False, {}


@pytest.mark.parametrize("kind", [gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv])
def test_an_environment_that_takes_short_seeds_only_gets_remainders(kind: Any) -> None:
    seeds = [simulator_seed(5, b) for b in (3, 4)]
    assert min(seeds) >= 2**32
    expected = [np.random.RandomState(seed % 2**31).uniform(size=2).astype(np.float32) for seed in seeds]
    alone = GymSimulators("older", lambda b: (Older(), 10**6), 2, 3)
    step = alone.reset(5)
    assert not step.restarts
    assert np.array_equal(step.observation.numpy(), expected)
    game = EnvGame(f"{__name__}:Older", {})
    assert np.array_equal(game.begin(seeds[0], 0), expected[0])
    vector = VectorSimulators("older", lambda: kind([Older, Older]), 2, 3)
    assert np.array_equal(vector.reset(5).observation.numpy(), expected)
    for simulators in (alone, vector):
        simulators.send(torch.zeros(2, dtype=torch.int64))
    assert torch.equal(alone.receive().observation, vector.receive().observation)
    vector.close()


class ToFile(Told):
    """Its own way of saving has little to do with ours."""

    def save_state(self, path: Any) -> None:
        raise AssertionError

    def load_state(self, path: Any) -> None:
        raise AssertionError


class Unsaved(Seedless):
    def save_state(self) -> Any:
        raise OSError("not now")


class Numbers(Seedless):
    """Its state is an array of a dtype that a checkpoint may not hold."""

    def __init__(self, dtype: str) -> None:
        super().__init__(np.random.default_rng(0))
        self.dtype = dtype

    def save_state(self) -> Any:
        return np.zeros(2, self.dtype)


@pytest.mark.parametrize(
    "dtype", ["complex128", "longdouble", "Q", ">f8", "datetime64[s]", "complex64", "uint64"]
)
def test_numbers_that_a_checkpoint_does_not_hold_are_not_saved(dtype: str, tmp_path: Path) -> None:
    simulators = GymSimulators("numbers", lambda b: (Numbers(dtype), 10**6), 1, 0)
    simulators.reset(0)
    state = simulators.state()
    assert (state is not None) == (dtype in ("complex64", "uint64"))
    part_file.write(tmp_path, "part", {"state": state}, lambda path: False)


def test_what_cannot_be_saved_as_documented_is_not_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_failures, "_printed", set())
    for make in (lambda: ToFile(wind), lambda: Unsaved(np.random.default_rng(0))):
        simulators = GymSimulators("unsaved", lambda b, make=make: (make(), 10**6), 1, 0)
        simulators.reset(0)
        assert simulators.state() is None
        assert simulators.state() is None
    assert capsys.readouterr().err.count("OSError: not now") == 1
