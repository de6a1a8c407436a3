"""Which messages about simulators that are started again are told."""

from __future__ import annotations

from murmurate.sources.simulator_groups import RestartMessages


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
