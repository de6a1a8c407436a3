"""What is said of environments that return what is no number, or not of their spaces."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from told import Told, make_rich, stepped

from murmurate.errors import RunFailed
from murmurate.native.system_calls import unnamed_file
from murmurate.worlds._game_server import Settings, Shared, _GameSlot
from murmurate.worlds._numbers import number
from murmurate.worlds._spaces import batch_size, row_of
from murmurate.worlds.gym_simulators import GymSimulators
from murmurate.worlds.vector_simulators import VectorSimulators

DICT = spaces.Dict({"goal": spaces.Box(-1, 1, (2,), np.float32), "rest": spaces.Tuple((spaces.Discrete(3),))})

IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)
BYTES = spaces.Dict({name: spaces.Box(0, 255, (1,), np.uint8) for name in ("goal", "load")})


class Ending(Told):
    """Every step ends an episode with this info."""

    def __init__(self, info: Any) -> None:
        super().__init__(lambda: (np.zeros(2, np.float32), 1.0))
        self._info = info

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, True, False, self._info


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (None, "its reward is None: step must return a number"),
        ("1", "its reward is '1': step must return a number"),
        (np.zeros(3), r"its reward is an array of shape (3,): step must return a number"),
    ],
)
def test_what_is_no_reward_is_named(reward: Any, words: str) -> None:
    (message,) = stepped(lambda: (np.zeros(2), reward)).restarts
    assert words in message
    with pytest.raises(ValueError, match="step must return a number"):
        number(reward)


@pytest.mark.parametrize(
    ("info", "words"),
    [(None, "its info is None: step must"), ({"success": np.ones(2)}, "it must be one truth value")],
)
def test_an_invalid_info_replaces_the_environment(info: Any, words: str) -> None:
    simulators = GymSimulators("ending", lambda b: (Ending(info), 10**6), 1, 0)
    simulators.reset(0)
    simulators.send(torch.zeros(1, dtype=torch.int64))
    step = simulators.receive()
    assert words in step.restarts[0]
    assert not step.episodes


@pytest.mark.parametrize(
    "reward", [2, 2.0, np.float32(2), np.array([2.0]), np.array([[2]]), torch.tensor(2.0)]
)
def test_an_array_of_one_number_is_a_reward(reward: Any) -> None:
    step = stepped(lambda: (np.zeros(2), reward))
    assert not step.restarts
    assert step.reward.tolist() == [2.0]


def test_a_reward_beyond_float32_is_not_passed_on() -> None:
    """Neither by the game server nor by a vector environment; none warns of the overflow."""
    game = {"make": f"{__name__}:make_rich", "options": {}}
    settings = Settings(
        "murmurate.worlds._env_game:EnvGame", game, "rich", 1, 0, (2,), "float32", (), None, 1, 10.0,
        unnamed_file("test"),
    )  # fmt: skip
    shared = Shared(settings)
    slot = _GameSlot(settings, shared, 0)
    slot.begin(0)
    slot.step(0)
    assert "it gave 1e+39 as its reward: it must be finite in float32" in slot.messages[0]
    assert (shared.lost[0], shared.reward[0]) == (True, 0.0)
    simulators = VectorSimulators("rich", lambda: gymnasium.vector.SyncVectorEnv([make_rich]), 1, 0)
    simulators.reset(0)
    simulators.send(torch.zeros(1, dtype=torch.int64))
    with pytest.raises(RunFailed, match="a reward not finite in float32"):
        simulators.receive()


def test_a_vector_environment_names_its_rewards_too() -> None:
    class Silent(gymnasium.vector.SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            seen, _, *rest = super().step(actions)
            return seen, [None], *rest

    simulators = VectorSimulators("told", lambda: Silent([lambda: Told(lambda: (np.zeros(2), 1))]), 1, 0)
    simulators.reset(0)
    simulators.send(torch.zeros(1, dtype=torch.int64))
    with pytest.raises(RunFailed, match=r"gave rewards of shape \(1,\) and object"):
        simulators.receive()


@pytest.mark.parametrize(
    ("space", "seen", "words"),
    [
        (None, np.array(["1", "2"]), "its observation holds <U1, and no numbers"),
        (None, np.array([None, 1]), "its observation holds object, and no numbers"),
        (IMAGE, np.full((8, 8, 3), 0.5), "its observation holds float64 with values other than whole"),
        (IMAGE, np.full((8, 8, 3), np.nan), "its observation holds float64 with values other"),
        (IMAGE, np.full((8, 8, 3), 256), "its observation holds int64 with values other than whole"),
        (BYTES, {"load": [-1], "goal": [1]}, "'load' of its observation holds int64 with values other than"),
        (DICT, {"goal": np.zeros(2)}, "'rest.0' of its observation is missing"),
        (DICT, {"goal": np.zeros((2, 2)), "rest": (1,)}, "'goal' of its observation has the shape [2, 2]"),
        (DICT, {"goal": np.zeros(2), "rest": ([0, 1],)}, "'rest.0' of its observation has the shape [2]"),
        (DICT, {"goal": np.array(["a", "b"]), "rest": (1,)}, "'goal' of its observation holds <U1"),
        (DICT, np.zeros(5), "'goal' of its observation is missing"),
    ],
)
def test_an_observation_without_the_shapes_or_numbers_of_its_space_is_named(
    space: Any, seen: Any, words: str
) -> None:
    (message,) = stepped(lambda: (seen, 1.0), space).restarts
    assert words in message


def test_whole_numbers_of_any_dtype_are_an_image() -> None:
    image = np.arange(8 * 8 * 3).reshape(8, 8, 3)
    for seen in (image.astype(np.uint8), image, image.astype(np.float32), torch.from_numpy(image)):
        step = stepped(lambda seen=seen: (seen, 1.0), IMAGE)
        assert not step.restarts
        assert torch.equal(step.observation[0], torch.from_numpy(image.astype(np.uint8)).permute(2, 0, 1))


def test_a_batch_is_known_by_the_axis_before_every_part() -> None:
    one = {"goal": np.zeros(2), "rest": (np.int64(1),)}
    batch = {"goal": np.zeros((3, 2)), "rest": (np.array([0, 1, 2]),)}
    assert batch_size(DICT, "told", (), one) is None
    assert batch_size(DICT, "told", (), batch) == 3
    assert batch_size(DICT, "told", ("goal",), {"goal": np.zeros((1, 2))}) == 1
    assert batch_size(DICT, "told", (), batch | {"goal": np.zeros((2, 2))}) is None
    assert batch_size(DICT, "told", (), {"goal": np.zeros((3, 2))}) is None
    assert batch_size(DICT, "told", (), [one, one]) is None
    assert row_of(batch, 2)["rest"] == (2,)


@pytest.mark.parametrize("name", ["observation", "reward"])
def test_a_number_beyond_float32_is_not_called_infinite(name: str) -> None:
    tells = {"observation": (np.array([0.0, -1e39]), 1.0), "reward": (np.zeros(2), -1e39)}
    (message,) = stepped(lambda: tells[name]).restarts
    assert f"gave -inf as its {name} (infinite, or beyond float32's 3.4e+38) and is started again" in message
    (message,) = stepped(lambda: (np.zeros(2), np.nan)).restarts
    assert "gave nan as its reward and is started again" in message
