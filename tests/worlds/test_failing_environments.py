"""What is said of environments that raise, or return what is no number."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import murmurate
from murmurate.errors import Refusal, RunFailed
from murmurate.native.system_calls import unnamed_file
from murmurate.training import part_file
from murmurate.worlds import _failures, _game_server, _own_env
from murmurate.worlds._env_game import EnvGame
from murmurate.worlds._game_server import Settings, Shared, _GameSlot
from murmurate.worlds._numbers import number
from murmurate.worlds._spaces import batch_size, row_of
from murmurate.worlds.generators import simulator_seed
from murmurate.worlds.gym_simulators import GymSimulators
from murmurate.worlds.vector_simulators import VectorSimulators

DICT = spaces.Dict({"goal": spaces.Box(-1, 1, (2,), np.float32), "rest": spaces.Tuple((spaces.Discrete(3),))})

IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)
BYTES = spaces.Dict({name: spaces.Box(0, 255, (1,), np.uint8) for name in ("goal", "load")})


class Told(gymnasium.Env[Any, Any]):
    """Its steps return what ``tell`` does: (observation, reward)."""

    action_space = spaces.Discrete(2)

    def __init__(self, tell: Callable[[], Any], space: Any = None) -> None:
        self._tell = tell
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32) if space is None else space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return *self._tell(), False, False, {}


class Ending(Told):
    """Every step ends an episode with this info."""

    def __init__(self, info: Any) -> None:
        super().__init__(lambda: (np.zeros(2, np.float32), 1.0))
        self._info = info

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, True, False, self._info


def make_silent() -> Told:
    return Told(lambda: (np.zeros(2, np.float32), None))


def make_rich() -> Told:
    return Told(lambda: (np.zeros(2, np.float32), 1e39))


def stepped(tell: Callable[[], Any], space: Any = None, steps: int = 1) -> Any:
    simulators = GymSimulators("told", lambda b: (Told(tell, space), 10**6), 1, 0)
    simulators.reset(0)
    for _ in range(steps):
        simulators.send(torch.zeros(1, dtype=torch.int64))
        step = simulators.receive()
    return step


def wind() -> Any:
    return {}["gust"]


def test_the_line_that_raised_is_named_and_its_traceback_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_failures, "_printed", set())
    (message,) = stepped(wind).restarts
    place = f"(test_failing_environments.py:{wind.__code__.co_firstlineno + 1} in wind)"
    assert f"raised KeyError in step: 'gust' {place} and is started again" in message
    with pytest.raises(RunFailed) as failure:
        stepped(wind, steps=6)
    assert str(failure.value).endswith(f"6 times in a row {place}. Mend the environment.")
    printed = capsys.readouterr().err
    assert printed.count("Traceback") == 1
    assert 'return {}["gust"]' in printed


@pytest.mark.parametrize(
    ("call", "old", "expected"),
    [
        ("step", lambda _, action: (np.zeros(2), 0.0, False, {}), "step returns (observation, reward, "),
        ("step", lambda _, action: None, "step returns (observation, reward, "),
        ("reset", lambda _: np.zeros(2, np.float32), "reset takes seed= and options=, and returns (obs"),
    ],
)
def test_an_environment_of_the_old_gym_is_told_what_gymnasium_expects(
    call: str, old: Callable[..., Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Told, call, old)
    with pytest.raises(RunFailed) as failure:
        stepped(wind, steps=6)
    assert f"times in a row. Mend the environment: {expected}" in str(failure.value)


def test_a_line_in_a_library_is_named_by_the_line_that_called_it() -> None:
    def divide() -> Any:
        return np.linalg.inv(np.zeros((2, 2)))

    (message,) = stepped(divide).restarts
    assert f":{divide.__code__.co_firstlineno + 1} in divide)" in message


def test_a_wrapper_is_advised_only_for_numbers() -> None:
    with pytest.raises(RunFailed, match="or register it with a wrapper that replaces such values"):
        stepped(lambda: (np.zeros(2), float("nan")), steps=6)


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


def test_a_served_environment_names_its_reward_too() -> None:
    game = EnvGame(f"{__name__}:make_silent", {})
    game.begin(0, 0)
    with pytest.raises(ValueError, match="its reward is None"):
        game.step(0)


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


class Leaving(Told):
    """Its steps exit, and each environment but the first can only be made at the second try."""

    tries = 0

    def __init__(self) -> None:
        super().__init__(self._leave)
        Leaving.tries += 1
        if Leaving.tries % 2 == 0:
            raise ConnectionError("not up yet")

    def _leave(self) -> Any:
        raise SystemExit(3)


def make_leaving() -> Any:
    return _own_env.call(Leaving, "leaving", False)


@pytest.mark.parametrize(("given", "kind"), [(np.zeros(2, np.float32), "ndarray"), (None, "NoneType")])
def test_a_reset_without_its_info_is_told_what_to_return(given: Any, kind: str) -> None:
    env = make_rich()
    env.reset = lambda **_: given  # type: ignore[method-assign]
    simulators = GymSimulators("bare", lambda b: (env, 10**6), 1, 0)
    with pytest.raises(RunFailed, match=rf"in reset: .* type {kind}, .* return \(observation, info\)"):
        simulators.reset(0)


def test_a_reset_that_fails_is_of_the_episode_that_it_begins() -> None:
    env = Told(lambda: (np.zeros(2, np.float32), 1.0))
    simulators = GymSimulators("told", lambda b: (env, 3), 1, 0)
    simulators.reset(0)
    env.reset = lambda **_: 1 / 0  # type: ignore[method-assign]
    for _ in range(2):
        simulators.send(torch.zeros(1, dtype=torch.int64))
        simulators.receive()
    simulators.send(torch.zeros(1, dtype=torch.int64))
    with pytest.raises(RunFailed, match=r"step 1 of its episode\) raised ZeroDivisionError in reset"):
        simulators.receive()


@pytest.mark.parametrize("name", ["observation", "reward"])
def test_a_number_beyond_float32_is_not_called_infinite(name: str) -> None:
    tells = {"observation": (np.array([0.0, -1e39]), 1.0), "reward": (np.zeros(2), -1e39)}
    (message,) = stepped(lambda: tells[name]).restarts
    assert f"gave -inf as its {name} (infinite, or beyond float32's 3.4e+38) and is started again" in message
    (message,) = stepped(lambda: (np.zeros(2), np.nan)).restarts
    assert "gave nan as its reward and is started again" in message


def make_far() -> Told:
    return Told(lambda: (np.array([0.0, 1e39]), 1.0))


class Unclosed(Told):
    """It closes a window that it has not opened."""

    def __init__(self) -> None:
        super().__init__(lambda: (np.zeros(2, np.float32), 1.0))

    def close(self) -> None:
        self.window.close()  # type: ignore[attr-defined]


def test_an_environment_that_cannot_be_closed_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_failures, "_printed", set())
    result = murmurate.train(
        env=Unclosed,
        algorithm="a2c",
        updates=2,
        world={"max_episode_steps": 5},
        launcher="inline",
        out=tmp_path / "run",
    )
    assert result.summary["updates"] == 2
    assert capsys.readouterr().err.count("'Unclosed' object has no attribute 'window'") == 1
    assert (
        "replica 0 could not close its source: AttributeError" in (tmp_path / "run/metrics.jsonl").read_text()
    )


def test_a_constructor_that_fails_in_a_replacement_is_one_more_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Leaving, "tries", 0)
    simulators = GymSimulators("leaving", lambda b: (make_leaving(), 10**6), 1, 0)
    simulators.reset(0)
    simulators.send(torch.zeros(1, dtype=torch.int64))
    first, second = simulators.receive().restarts
    assert "raised SystemExit in step: 3" in first
    assert "raised ConnectionError in its constructor: not up yet (test_failing_environments.py:" in second
    simulators.send(torch.zeros(1, dtype=torch.int64))
    simulators.receive()
    simulators.send(torch.zeros(1, dtype=torch.int64))
    with pytest.raises(RunFailed, match=r"It failed 6 times in a row"):
        simulators.receive()
    monkeypatch.setattr(Leaving, "tries", 1)
    with pytest.raises(Refusal, match="its function raised ConnectionError"):
        GymSimulators("leaving", lambda b: (make_leaving(), 10**6), 1, 0)


def served_slot(make: str) -> tuple[_GameSlot, Shared]:
    game = {"make": f"{__name__}:{make}", "options": {}}
    settings = Settings(
        "murmurate.worlds._env_game:EnvGame", game, make, 1, 0, (2,), "float32", (), None, 1, 10.0,
        unnamed_file("test"),
    )  # fmt: skip
    shared = Shared(settings)
    return _GameSlot(settings, shared, 0), shared


def test_a_served_environment_that_exits_is_replaced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leaving, "tries", 0)
    slot, shared = served_slot("make_leaving")
    slot.begin(0)
    slot.step(0)
    assert shared.lost[0]
    first, second = slot.messages
    assert "is started again after SystemExit: 3" in first
    assert "is started again after ConnectionError: not up yet (test_failing_environments.py:" in second


def test_a_served_environment_names_numbers_beyond_float32_too() -> None:
    slot, _ = served_slot("make_far")
    slot.begin(0)
    slot.step(0)
    assert "it gave inf as its observation (infinite, or beyond float32's 3.4e+38)" in slot.messages[0]


def test_a_slow_start_is_not_taken_for_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, _ = served_slot("make_silent")
    slot.begin(0)
    watched = contextlib.ExitStack()
    watched.enter_context(slot._watched(_game_server.START_SECONDS))
    began = time.monotonic()

    def monotonic() -> float:
        """The start ends, and a step begins, while the watching thread looks at the clock."""
        watched.close()
        monkeypatch.setattr(_game_server.time, "monotonic", lambda: began + 30.0)
        watched.enter_context(slot._watched(10.0))
        return began + 30.0

    monkeypatch.setattr(_game_server.time, "monotonic", monotonic)
    assert not slot.kill_if_hung()
    monkeypatch.setattr(_game_server.time, "monotonic", lambda: began + 40.5)
    assert slot.kill_if_hung()


def test_only_the_first_opening_of_a_served_environment_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leaving, "tries", 1)
    slot, _ = served_slot("make_leaving")
    with pytest.raises(Refusal, match="its function raised ConnectionError"):
        slot.begin(0)
    monkeypatch.setattr(Leaving, "tries", 1)
    slot, _ = served_slot("make_leaving")
    slot.steps = 9  # its server has died in the middle of a run
    slot.begin(0)
    assert "ConnectionError: not up yet" in slot.messages[0]


def test_the_line_that_called_compiled_code_is_named() -> None:
    def draw() -> Any:
        return np.random.default_rng(0).integers(0)

    (message,) = stepped(draw).restarts
    assert f"(test_failing_environments.py:{draw.__code__.co_firstlineno + 1} in draw)" in message


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
