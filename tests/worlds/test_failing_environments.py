"""What is said of environments that raise, exit or hang."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from told import Told, make_rich, stepped, wind

import murmurate
from murmurate.errors import Refusal, RunFailed
from murmurate.native.system_calls import unnamed_file
from murmurate.worlds import _failures, _game_server, _own_env
from murmurate.worlds._env_game import EnvGame
from murmurate.worlds._game_server import Settings, Shared, _GameSlot
from murmurate.worlds.gym_simulators import GymSimulators


def make_silent() -> Told:
    return Told(lambda: (np.zeros(2, np.float32), None))


def test_the_line_that_raised_is_named_and_its_traceback_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_failures, "_printed", set())
    (message,) = stepped(wind).restarts
    place = f"(told.py:{wind.__code__.co_firstlineno + 1} in wind)"
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


def test_a_served_environment_names_its_reward_too() -> None:
    game = EnvGame(f"{__name__}:make_silent", {})
    game.begin(0, 0)
    with pytest.raises(ValueError, match="its reward is None"):
        game.step(0)


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
