"""The terminal display says what the records say, at both widths, and plainly where there is none."""

import errno
import io
import math
import sys

import pytest
import rich.console

from murmurate.record.console import Console, clock, sparkline
from murmurate.record.progress import Progress


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def row(t: float, replica: int, steps: int, **fields):
    return {"time_seconds": t, "replica": replica, "env_steps": steps, "updates": steps // 80, **fields}


def event(t: float, name: str, message: str, **fields):
    fields = {"replica": None, **fields}
    return {"time_seconds": t, "kind": "event", "event": name, "message": message, "env_steps": 0, **fields}


def a_run():
    """Two replicas for 100 s, 40 and 20 steps a second; replica 1 dies at 50 s."""
    records = []
    for t in range(10, 101, 10):
        records.append(
            row(t, 0, 40 * t, return_mean=t / 10, env_steps_per_second=40.0, loss=0.5, staleness=2)
        )
        if t <= 50:
            records.append(row(t, 1, 20 * t, return_mean=-t / 10, disagreement=2e-3, loss=0.25, staleness=7))
        if t == 50:
            # Two survivors tell of one death.
            records += [event(t, "died", "replica 1 died (SIGKILL)", member=1, replica=r) for r in (0, None)]
    return records


def show(width: int, records, elapsed: float = 100.0, **options) -> str:
    screen = rich.console.Console(width=width, record=True, file=io.StringIO(), force_terminal=True)
    console = Console("cartpole-gala", 2, console=screen, elapsed=lambda: elapsed, **options)
    console._live = object()  # type: ignore[assignment]  # on screen: feed prints nothing of its own
    console.feed(records)
    screen.print(console.render())
    return screen.export_text()


def cells(text: str, first: str) -> list[str]:
    (line,) = [ln for ln in text.splitlines() if ln.lstrip("│ ").startswith(first + " ")]
    return line.strip("│ ").split()


@pytest.mark.parametrize("width", [80, 120])
def test_rows_hold_the_newest_numbers_and_fit_the_width(width: int) -> None:
    text = show(width, a_run(), target_env_steps=10_000)
    assert all(len(line) == width for line in text.splitlines() if line)
    steps = {"living": "4,000", "dead": "1,000", "total": "5,000"}
    assert cells(text, "0")[:3] == ["0", "running", steps["living"]]
    assert cells(text, "1")[:3] == ["1", "dead", steps["dead"]]
    assert cells(text, "all")[:4] == ["all", "1", "alive", steps["total"]]
    shift = 1 if width == 120 else 0  # the wide table has the updates too
    living, dead, total = cells(text, "0"), cells(text, "1"), cells(text, "all")
    # steps/s, return, staleness, disagreement, loss
    assert living[3 + shift : 8 + shift] == ["40", "10.00", "2", "-", "0.50"]
    assert dead[3 + shift : 8 + shift] == ["-", "-5.00", "7", "2.0e-03", "0.25"]
    # All replicas' rate over the last minute; the rest over the living: the dead one's is history.
    assert total[4 + shift : 9 + shift] == [f"{(5000 - 2400) / 60:.0f}", "10.00", "2", "-", "0.50"]
    assert "50.0%" in text
    assert text.count("replica 1 died (SIGKILL)") == 1
    # 5,000 steps to go at the rate of the last minute.
    assert f"ETA {clock(5000 / ((5000 - 2400) / 60))}" in text


def test_what_is_not_known_is_not_invented() -> None:
    text = show(80, [])
    for replica in ("0", "1"):
        assert cells(text, replica)[1] == "starting"
        assert set(cells(text, replica)[2:]) == {"-"}
    assert "0.0%   ETA --" in text
    assert "return ▁" not in text


def test_silence_nan_and_the_end_are_shown() -> None:
    records = [
        row(10, 0, 100, loss=0.5),
        row(20, 0, 200, loss=None, not_finite=["loss"]),
        row(90, 1, 300, loss=1.0),
        event(91, "finished", "replica 1 finished", member=1),
    ]
    text = show(100, records)
    assert "silent 80s" in text
    assert "NaN" in cells(text, "0")
    assert cells(text, "1")[1] == "finished"


def test_the_silence_of_a_replica_ends_with_a_resume() -> None:
    records = [
        row(10, 0, 100),
        event(12, "silent", "replica 0 has sent no heartbeat for 2.0 s", member=0),
        event(14, "resumed", "resumed at 100 env steps"),
        row(16, 0, 160),
    ]
    assert cells(show(100, records[:2], elapsed=13), "0")[1:3] == ["silent", "3s"]
    assert cells(show(100, records, elapsed=17), "0")[1] == "running"


def test_a_target_of_seconds_gives_an_eta_too() -> None:
    assert "ETA 0:05:00" in show(80, a_run(), target_seconds=400.0)


def test_more_replicas_than_lines_says_so_and_keeps_the_dead() -> None:
    screen = rich.console.Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    console = Console("big", 40, console=screen, elapsed=lambda: 1.0)
    console.progress.feed([row(1, i, 10) for i in range(40)] + [event(1, "died", "gone", member=33)])
    screen.print(console.render())
    text = screen.export_text()
    assert "and 24 more" in text
    assert cells(text, "33")[1] == "dead"
    assert cells(text, "all")[1:4] == ["39", "alive", "400"]


def test_without_a_terminal_a_line_every_interval_and_each_event_at_once() -> None:
    time, out = Time(), io.StringIO()
    screen = rich.console.Console(file=out, width=60)
    assert not screen.is_terminal
    records = a_run()
    with Console("cartpole-gala", 2, 10_000, console=screen, elapsed=time) as console:
        for now in range(0, 101, 1):
            time.now = float(now)
            console.feed([r for r in records if r["time_seconds"] == now])
            console.refresh()
    lines = out.getvalue().splitlines()
    assert lines[0] == "cartpole-gala"
    assert [ln for ln in lines if "died" in ln] == ["[0:00:50] replica 1 died (SIGKILL)"]
    status = [ln for ln in lines if "env steps" in ln]
    assert len(status) == 11  # ten intervals, and the end
    assert status[0].startswith("[0:00:10] 600 env steps (6.0%), 60/s, return 0.00, staleness 7")
    assert status[-1].startswith(
        "[0:01:40] 5,000 env steps (50.0%), 43/s, return 10.00, staleness 2, dead [1]"
    )
    assert all(ln.isascii() for ln in lines)


def test_what_another_signal_does_is_told_on_the_console_alone() -> None:
    out = io.StringIO()
    with Console("run", 2, 100, console=rich.console.Console(file=out, width=60), elapsed=Time()) as console:
        console.feed([event(1.0, "stopping", "stopping: SIGTERM")])
    assert "] stopping: SIGTERM; once more stops without saving" in out.getvalue()


def test_env_steps_of_a_batch_that_is_not_complete_are_shown() -> None:
    console = Console("pong-arm", 1, elapsed=lambda: 10.0, target_env_steps=1000)
    console.feed([], 512)
    assert "512 env steps (51.2%)" in console.line()
    console.feed([row(10.0, 0, 600)], 600)
    console.feed([], 590)  # a replica that was restarted
    assert "600 env steps" in console.line()


def test_a_run_that_its_updates_end_shows_its_end_before_the_first_update() -> None:
    assert "0.0%   ETA --" in show(80, [], target_updates=100)
    records = [row(10, i, 800, updates=10) for i in range(2)]
    assert "10.0%   ETA 0:01:30" in show(80, records, elapsed=10.0, target_updates=100)


def test_live_display_starts_and_stops_cleanly() -> None:
    out = io.StringIO()
    screen = rich.console.Console(file=out, width=80, force_terminal=True)
    with Console("cartpole-gala", 2, 10_000, console=screen, elapsed=lambda: 100.0) as console:
        console.feed(a_run())
        console.refresh()
    assert "5,000" in out.getvalue()
    assert out.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    screen = rich.console.Console(file=out, width=80, force_terminal=True)
    with Console("cartpole-gala", 2, 10_000, console=screen, elapsed=Time()) as console:
        console.feed(a_run())
        assert "replica 1 died" in out.getvalue()
    assert "\x1b[" not in out.getvalue()


def test_the_rate_forgets_what_happened_before_a_resume() -> None:
    progress = Progress(2)
    progress.feed([row(90, 0, 400_000), row(100, 1, 500_000), event(100, "resumed", "resumed")])
    assert progress.env_steps_per_second is None  # one point is no rate
    progress.feed([row(101, 0, 400_100), row(101.001, 1, 500_100)])  # in no time after one another
    assert progress.env_steps_per_second == pytest.approx(200.0, rel=0.01)
    progress.feed([row(111, 0, 401_100), row(111, 1, 501_100)])
    assert progress.env_steps_per_second == pytest.approx(200.0)


def test_a_resumed_run_does_not_print_its_earlier_events_again() -> None:
    out = io.StringIO()
    screen = rich.console.Console(file=out, width=60)
    with Console("cartpole-gala", 2, console=screen, elapsed=lambda: 60.0) as console:
        console.feed([event(50, "died", "replica 1 died"), event(60, "resumed", "resumed at 9 env steps")])
    assert "died" not in out.getvalue()
    assert "resumed at 9 env steps" in out.getvalue()


def test_long_histories_stay_short_and_evenly_spaced() -> None:
    progress = Progress(1)
    total = 30_000
    progress.feed(row(float(i), 0, i, return_mean=float(i)) for i in range(total))
    gaps = {b - a for a, b in zip(progress.returns, progress.returns[1:], strict=False)}
    assert len(progress.returns) <= 4096
    assert len(gaps) == 1
    assert progress.returns[-1] > total - 2 * gaps.pop()


def test_sparkline_against_hand_made_ones() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 2, 5, 9], 2) == "▁█"
    assert sparkline([3.0, 3.0, 3.0], 5) == "▁▁▁"
    assert sparkline([math.pi], 5) == "▁"


def test_a_resume_brings_the_dead_and_the_finished_back() -> None:
    progress = Progress(2)
    progress.feed([row(1, 0, 10), event(2, "died", "gone", member=0), event(2, "finished", "", member=1)])
    assert [r.state(2.0, 15.0) for r in progress.replicas] == ["dead", "finished"]
    progress.feed([event(3, "resumed", "resumed"), row(4, 1, 20)])
    assert [r.state(4.0, 15.0) for r in progress.replicas] == ["running", "running"]
    # and a death after it is told again
    assert len(progress.feed([event(5, "died", "gone again", member=0)])) == 1


def test_plain_output_names_a_checkpoint_as_often_as_a_line_but_every_death() -> None:
    screen = rich.console.Console(width=100, file=io.StringIO(), force_terminal=False)
    console = Console("cartpole-gala", 2, console=screen, elapsed=lambda: 0.0, interval_seconds=10.0)
    console.feed([event(t / 2, "checkpoint", f"checkpoint at {t}") for t in range(50)])
    console.feed([event(0.1, "died", "replica 1 died"), event(0.2, "died", "replica 0 died")])
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[-1] for line in lines if "checkpoint" in line] == ["0", "20", "40"]
    assert sum("died" in line for line in lines) == 2


def test_each_death_of_a_replica_that_is_started_again_is_told() -> None:
    progress = Progress(2)
    again = [event(2, "restarted", "started again", member=0), event(3, "died", "KeyError", member=0)]
    told = progress.feed([event(1, "died", "SIGKILL", member=0), *again, *again, *again[1:]])
    assert [e["message"] for e in told if e["event"] == "died"] == ["SIGKILL", "KeyError", "KeyError"]
    assert progress.replicas[0].dead


def test_a_target_of_updates_gives_a_percentage_and_an_eta() -> None:
    """Replica 0 makes an update every 80 steps; replica 1 is dead."""
    text = show(80, a_run(), target_env_steps=10**6, target_updates=100)
    assert "50.0%" in text  # 50 of its 100 updates
    assert f"ETA {clock(5000 / ((5000 - 2400) / 60))}" in text
    done = show(80, [row(10, 0, 8000), row(10, 1, 8000)], target_env_steps=10**6, target_updates=100)
    assert "100.0%" in done
    assert "ETA 0:00:00" in done


class Full(io.StringIO):
    """A stream on a disk that fills up after ``writes`` writes."""

    writes = 1

    def write(self, text: str) -> int:
        self.writes -= 1
        if self.writes < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_stream_that_fails_turns_the_display_off_once(terminal: bool, writes: int) -> None:
    out = Full()
    out.writes = writes
    screen = rich.console.Console(width=100, file=out, force_terminal=terminal)
    console = Console("cartpole-gala", 2, console=screen, elapsed=Time(), interval_seconds=0.0)
    stdout = sys.stdout
    with pytest.warns(UserWarning, match="No space left on device") as told:
        _show(console, [event(1, "resumed", "resumed")], a_run())
    assert len(told) == 1
    assert sys.stdout is stdout
    assert console.progress.env_steps == 5000


def _show(console: Console, *polls: list[dict]) -> None:
    with console:
        for records in polls:
            console.feed(records)
            console.refresh()


def test_errors_that_are_not_the_streams_are_not_hidden() -> None:
    console = Console("cartpole-gala", 2, console=rich.console.Console(file=io.StringIO()))
    with pytest.raises(SystemExit), console._tolerant():
        raise SystemExit(3)
