"""The record file: whole lines from many processes, honest nulls, a cut future, a full disk."""

import json
import math
import multiprocessing
import os
import resource
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from murmurate.errors import RunFailed
from murmurate.record.reader import Tail, parse_line, read_metrics, truncate_after
from murmurate.record.recorder import Recorder


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def _write_many(path: str, replica: int, barrier, count: int) -> None:
    with closing(Recorder(path, replica, 0.0)) as recorder:
        barrier.wait()
        for i in range(count):
            # Lines of very different lengths, some beyond a page and beyond PIPE_BUF.
            padding = "x" * ((i * 977 + replica * 331) % 9000)
            recorder.record({"env_steps": i, "updates": i, "padding": padding})


def test_many_processes_append_whole_lines_in_each_ones_order(tmp_path: Path) -> None:
    path, writers, count = tmp_path / "metrics.jsonl", 4, 300
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(writers)
    processes = [
        context.Process(target=_write_many, args=(str(path), r, barrier, count)) for r in range(writers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    records = [json.loads(line) for line in lines]  # raises on a torn line
    assert len(records) == writers * count
    for replica in range(writers):
        mine = [r for r in records if r["replica"] == replica]
        assert [r["env_steps"] for r in mine] == list(range(count))
        expected = [(i * 977 + replica * 331) % 9000 for i in range(count)]
        assert [len(r["padding"]) for r in mine] == expected


def test_every_line_has_the_four_keys_and_time_goes_on_after_a_resume(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    path = tmp_path / "metrics.jsonl"
    with closing(Recorder(path, 3, 990.0, offset_seconds=500.0, clock=clock)) as recorder:
        recorder.record({"env_steps": 80, "updates": 1, "loss": torch.tensor(0.5)})
        clock.now = 1001.5
        recorder.record({"loss": np.float32(0.25), "gradient_cosine": torch.tensor([1.0, 0.5])})
        recorder.event("checkpoint", "checkpoint written", size_bytes=12)
    first, second, event = read_metrics(path)
    assert first == {
        "time_seconds": 510.0,
        "env_steps": 80,
        "updates": 1,
        "loss": 0.5,
        "replica": 3,
    }
    assert second["time_seconds"] == 511.5
    assert (second["env_steps"], second["updates"]) == (80, 1)
    assert (second["loss"], second["gradient_cosine"]) == (0.25, [1.0, 0.5])
    assert (event["kind"], event["event"], event["size_bytes"]) == ("event", "checkpoint", 12)
    assert (event["replica"], event["env_steps"], event["time_seconds"]) == (3, 80, 511.5)


def test_not_finite_is_null_and_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(Recorder(path, 0, 0.0)) as recorder:
        recorder.record(
            {
                "loss": torch.tensor(math.nan),
                "entropy": -math.inf,
                "gradient_cosine": [1.0, None, math.nan],
                "value_loss": 1.0,
                "policy_loss": None,
            }
        )
    (record,) = read_metrics(path)
    assert record["loss"] is None
    assert record["entropy"] is None
    assert record["gradient_cosine"] == [1.0, None, None]
    # null alone is "unknown", not "not finite".
    assert sorted(record["not_finite"]) == ["entropy", "gradient_cosine", "loss"]
    assert b"NaN" not in path.read_bytes()


def test_a_strategys_figures_replace_none_and_are_not_lost(tmp_path: Path) -> None:
    with closing(Recorder(tmp_path / "metrics.jsonl", 3, 0.0)) as recorder:
        recorder.record({"staleness": 1, "updates": 5}, {"period": 4.0, "staleness": 7.0, "replica": 9.0})
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["staleness"], record["strategy_staleness"], record["period"]) == (1, 7.0, 4.0)
    assert (record["replica"], record["strategy_replica"]) == (3, 9.0)


def test_a_strategys_figure_has_one_name_though_only_some_records_have_its_field(tmp_path: Path) -> None:
    own = {"disagreement": 1.0, "figure_energy": 2.0, "success_rate": 3.0, "mine": 4.0}
    with closing(Recorder(tmp_path / "metrics.jsonl", 0, 0.0)) as recorder:
        recorder.record({}, own)
        recorder.record({"disagreement": 0.5, "figure_energy": 0.5, "success_rate": 0.5, "late": 0.5}, own)
        recorder.record({}, own | {"late": 5.0})
    for record in (records := read_metrics(tmp_path / "metrics.jsonl")):
        names = [name.removeprefix("strategy_") for name in record if record[name] in own.values()]
        assert names == [*own]
    assert records[2]["strategy_late"] == 5.0


def test_a_line_glued_to_a_torn_one_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(Recorder(path, 0, 0.0)) as recorder:
        recorder.record({"env_steps": 1})
    whole = path.read_bytes()
    for cut in range(1, len(whole) - 1):
        path.write_bytes(whole[:cut])  # what a process killed inside its write leaves
        with closing(Recorder(path, 1, 0.0)) as recorder:
            recorder.record({"env_steps": 2, "note": 'quotes {"time_seconds": 9} inside'})
        (record,) = read_metrics(path)
        assert (record["replica"], record["env_steps"]) == (1, 2)


def test_reader_leaves_out_a_torn_last_line_and_warns_of_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(Recorder(path, 0, 0.0)) as recorder:
        recorder.record({"env_steps": 1})
        recorder.record({"env_steps": 2})
    path.write_bytes(path.read_bytes()[:-5])
    assert [r["env_steps"] for r in read_metrics(path)] == [1]
    path.write_bytes(b'{"time_seconds":1,"repl\n' + path.read_bytes())
    with pytest.warns(UserWarning, match="1 damaged of 2"):
        assert [r["env_steps"] for r in read_metrics(path)] == [1]


def _run_of_two(path: Path) -> None:
    clock = Clock(0.0)
    with closing(Recorder(path, 0, 0.0, clock=clock)) as a, closing(Recorder(path, 1, 0.0, clock=clock)) as b:
        with closing(Recorder(path, None, 0.0, clock=clock)) as launcher:
            for t in range(1, 11):
                clock.now = float(t)
                a.record({"env_steps": 100 * t})
                b.record({"env_steps": 50 * t})
                launcher.event("tick", f"second {t}")


@pytest.mark.parametrize(
    ("env_steps", "seconds", "kept"),
    [
        # kept: last env_steps of replica 0, of replica 1, number of the launcher's events
        ({}, 4.0, (400, 200, 4)),
        ({}, 4.999, (400, 200, 4)),
        ({0: 200, 1: 200}, math.inf, (200, 200, 10)),
        ({0: 300, 1: 450}, math.inf, (300, 450, 10)),
        ({0: 300}, 7.0, (300, 350, 7)),
        ({0: 900, 1: 450}, 2.0, (200, 100, 2)),
    ],
)
def test_truncate_after_drops_what_is_later_than_the_checkpoint(
    tmp_path: Path, env_steps: dict[int, int], seconds: float, kept: tuple[int, int, int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    _run_of_two(path)
    before = read_metrics(path)
    with path.open("ab") as file:
        file.write(b'{"time_seconds":1.0,"env_st')  # the crash tore this
    truncate_after(path, env_steps=env_steps, updates={}, time_seconds=seconds)
    after = read_metrics(path)
    assert after == [r for r in before if r in after]  # order and content untouched
    last = [max(r["env_steps"] for r in after if r["replica"] == i) for i in (0, 1)]
    assert (*last, sum(r["replica"] is None for r in after)) == kept
    assert path.read_bytes().endswith(b"}\n")
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    content = path.read_bytes()
    truncate_after(path, env_steps=env_steps, updates={}, time_seconds=seconds)
    assert path.read_bytes() == content


def test_truncate_after_keeps_what_a_replica_had_recorded_before_it_joined_again(tmp_path: Path) -> None:
    # it came back at 52,000 env steps with a peer's number of updates, lower than its own before
    path, clock = tmp_path / "metrics.jsonl", Clock(0.0)
    made = [
        (20_000, 4_000),
        (50_000, 10_000),
        (52_000, 5_300),
        (56_000, 6_300),
        (56_000, 6_400),
        (57_000, 6_400),
    ]
    with closing(Recorder(path, 1, 0.0, clock=clock)) as recorder:
        for env_steps, updates in made:
            recorder.record({"env_steps": env_steps, "updates": updates})
    truncate_after(path, env_steps={1: 56_000}, updates={1: 6_300}, time_seconds=60.0)
    assert [(r["env_steps"], r["updates"]) for r in read_metrics(path)] == made[:4]


def test_truncate_after_leaves_the_old_file_when_the_new_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    _run_of_two(path)
    before = path.read_bytes()

    def crash(descriptor: int) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="power cut"):
        truncate_after(path, env_steps={}, updates={}, time_seconds=3.0)
    assert path.read_bytes() == before


def test_truncate_after_drops_damaged_lines_and_warns_of_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _run_of_two(path)
    whole = path.read_bytes()
    path.write_bytes(b'{"time_seconds":1,"repl\n' + whole)
    with pytest.warns(UserWarning, match="left out 1 damaged of"):
        truncate_after(path, env_steps={}, updates={}, time_seconds=1000.0)
    assert path.read_bytes() == whole


def test_truncate_after_accepts_no_file(tmp_path: Path) -> None:
    truncate_after(tmp_path / "metrics.jsonl", env_steps={0: 3}, updates={}, time_seconds=3.0)
    assert list(tmp_path.iterdir()) == []


def test_tail_yields_each_record_once_when_its_line_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    source = tmp_path / "source.jsonl"
    _run_of_two(source)
    expected, content = read_metrics(source), source.read_bytes()
    tail = Tail(path)
    assert tail.poll() == []  # not there yet
    seen = []
    with path.open("ab", buffering=0) as file:
        for start in range(0, len(content), 37):
            file.write(content[start : start + 37])
            complete = content[: start + 37].count(b"\n")
            seen += tail.poll()
            assert len(seen) == complete
    assert seen == expected
    assert tail.poll() == []
    truncate_after(path, env_steps={}, updates={}, time_seconds=2.0)
    assert tail.poll() == read_metrics(path)  # replaced: starts over


def test_a_full_disk_stops_the_run_with_a_sentence() -> None:
    with closing(Recorder("/dev/full", 0, 0.0)) as recorder:
        with pytest.raises(RunFailed, match=r"The disk that holds /dev/full is full: free some space"):
            recorder.record({"loss": 1.0})


def test_a_line_that_fits_only_in_part_stops_the_run_and_hurts_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    written: list[int] = []

    def fill(recorder: Recorder) -> None:
        for step in range(10):
            recorder.record({"env_steps": step})
            written.append(step)

    with closing(Recorder(path, 0, 0.0)) as recorder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150, limits[1]))
        try:
            with pytest.raises(RunFailed, match="is full"):
                fill(recorder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [r["env_steps"] for r in read_metrics(path)] == written
    assert path.stat().st_size == 150
    with closing(Recorder(path, 1, 0.0)) as recorder:
        recorder.record({"env_steps": 77})
    assert read_metrics(path)[-1]["env_steps"] == 77


def test_a_file_that_cannot_be_opened_is_a_sentence_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunFailed, match="Make the folder writable"):
        Recorder(tmp_path / "metrics.jsonl", 0, 0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"time_seconds": "1"},
        {"time_seconds": None},
        {"replica": "0"},
        {"replica": 10**9},
        {"env_steps": 10**400},
        {"env_steps": [1]},
        {"loss": 10**4000},
        {"message": 5},
        {"episode_returns": [[1.0]]},
        {"episode_returns": [["1", 2]]},
        {"spans": [["learn", 0.1]]},
        {"staleness_counts": {"x": 1}},
        {"gradient_cosine": ["1"]},
        {"not_finite": [1]},
        {"joined_replicas": "all"},
        {"snapshot_seconds": "1"},
        {"message": "\ud800"},
    ],
)
def test_a_record_with_a_value_of_another_kind_is_damaged(fields: dict) -> None:
    good = {"time_seconds": 1.0, "env_steps": 3, "updates": 1, "replica": 0}
    assert parse_line(json.dumps(good, separators=(",", ":")).encode()) == good
    assert parse_line(json.dumps(good | fields, separators=(",", ":")).encode()) is None


def test_a_record_that_is_nested_too_deeply_is_damaged() -> None:
    assert parse_line(b'{"time_seconds":1,"replica":0,"x":' + b"[" * 10**5 + b"]" * 10**5 + b"}") is None
