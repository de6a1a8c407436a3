"""Which messages about simulators that are started again are told, and what is said of double buffers."""

from __future__ import annotations

import warnings

import pytest

from murmurate.cli.options import change
from murmurate.recipes import recipe
from murmurate.sources.simulator_groups import RestartMessages
from murmurate.training.preflight import _warn_of_double_buffer
from murmurate.worlds.registry import world_names


def test_the_first_ten_messages_are_told_and_then_those_whose_number_is_a_power_of_two() -> None:
    messages = RestartMessages()
    told = {number: messages.told([f"the {number}. is started again"]) for number in range(1, 70)}
    assert [number for number, lines in told.items() if lines] == [*range(1, 11), 16, 32, 64]
    assert told[10] == ["the 10. is started again"]
    assert told[16] == [
        "the 16. is started again. 16 simulators have been started again so far; the next line like this is "
        "message 32"
    ]
    assert messages.count == 69


def test_equal_messages_of_a_step_are_one_and_count_as_the_simulators_they_are_of() -> None:
    messages = RestartMessages()
    assert messages.told(["a process ended"] * 8 + ["another ended"]) == ["a process ended", "another ended"]
    assert messages.count == 9
    for _ in range(13):
        messages.told(["a process ended"] * 8)
    (line,) = messages.told(["a process ended"] * 8)
    assert "121 simulators have been started again so far; the next line like this is message 32" in line


@pytest.mark.parametrize(
    ("name", "background"),
    [
        ("cartpole", False),
        ("halfcheetah", False),
        ("adroit-pen", False),
        ("dmc-cheetah-run", False),
        ("dmc-cheetah-run-pixels", True),
        ("pong", True),
    ],
)
def test_where_a_double_buffer_saves_no_time_it_is_said(name: str, background: bool) -> None:
    if name not in world_names():
        pytest.skip(f"the package of {name} is not installed")
    run = change(recipe(f"{name}-a2c"), ["--double-buffer", "true"], "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _warn_of_double_buffer(run)
        _warn_of_double_buffer(recipe(f"{name}-a2c"))
        if not background:
            _warn_of_double_buffer(change(run, ["--world.served", "true"], ""))
    assert len(caught) == (not background)
    assert all("the learner waits while the simulators of" in str(each.message) for each in caught)
