"""The numbers and curves of groups of runs against ones made by hand or by a slow way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from a_run_folder import a_run, line, write_run

from murmurate.record import comparison, groups
from murmurate.record.drawings import classes
from murmurate.record.figures import byte_size, tick_text
from murmurate.record.groups import grouped
from murmurate.record.pooled_returns import pooled_returns
from murmurate.record.runs import open_run, sum_of_paths


def test_a_replica_that_joins_late_does_not_shorten_the_curve(tmp_path: Path) -> None:
    for seed in (0, 1):
        records = [line(float(t), 0, loss=1.0) for t in range(1, 101)]
        records += [line(float(t), 1, loss=3.0) for t in range(2, 101)]
        records += [line(float(t), 2, loss=5.0) for t in range(90, 101)] if seed else []
        a_run(tmp_path / str(seed), records, {"name": "gala", "topology": "ring"}, replicas=3, seed=seed)
    (group,) = grouped([open_run(tmp_path / str(seed)) for seed in (0, 1)])
    curve = group.curve("loss", "time_seconds")
    assert curve is not None
    assert curve.x[0] == 2.0, "where the others have begun"
    assert curve.x[-1] == 100.0


def test_curve_is_the_mean_over_runs_where_all_have_records(tmp_path: Path) -> None:
    first = [line(t, i, return_mean=10.0 * t) for t in (1.0, 5.0) for i in (0, 1)]
    second = [line(t, i, return_mean=4.0 * t) for t in (2.0, 4.0) for i in (0, 1)]
    strategy = {"name": "gala"}
    (group,) = grouped(
        [open_run(a_run(tmp_path / n, r, strategy, seed=n)) for n, r in (("a", first), ("b", second))]
    )
    curve = group.curve("return_mean", "time_seconds")
    assert (curve.x[0], curve.x[-1]) == (2.0, 4.0)
    np.testing.assert_allclose(curve.mean, 7 * curve.x)
    np.testing.assert_allclose(curve.low, 4 * curve.x)
    np.testing.assert_allclose(curve.high, 10 * curve.x)
    assert group.curve("loss", "time_seconds") is None


def test_sum_of_broken_lines_against_interpolating_each() -> None:
    generator = np.random.default_rng(11)
    paths = []
    for _ in range(7):
        times = np.concatenate([[0.0], np.sort(generator.uniform(0, 10, 12))])
        times[5] = times[4]  # two records of one moment: a jump
        paths.append((times, np.concatenate([[0.0], np.cumsum(generator.uniform(0, 5, 12))])))
    corners, values = sum_of_paths(paths)
    at = generator.uniform(0, 12, 500)
    expected = sum(np.interp(at, *one) for one in paths)
    np.testing.assert_allclose(np.interp(at, corners, values), expected, rtol=1e-9)


def test_bytes_are_those_of_all_members_the_centre_too(tmp_path: Path) -> None:
    records = [line(t, i, bytes_exchanged=int(100 * t)) for t in (10.0, 20.0) for i in (0, 1)]
    records += [
        {"time_seconds": 20.0, "kind": "centre", "replica": None, "member": 2, "bytes_exchanged": 3000}
    ]
    run = open_run(a_run(tmp_path / "run", records, {"name": "elastic"}))
    np.testing.assert_allclose(run.total_bytes(np.array([0.0, 10.0, 20.0])), [0, 2000 + 1500, 4000 + 3000])
    assert groups.bytes_exchanged(run) == 7000
    assert groups.bytes_per_update(run) == 7000 / 400
    assert groups.exchanges(run)
    assert len(run.records) == 4  # the centre is no replica


def test_the_line_of_several_replicas_counts_their_updates(tmp_path: Path) -> None:
    """A simulation joins many replicas: their bytes are a sum, and their updates a median."""
    records = [line(t, 0, updates=20, joined_replicas=32, bytes_exchanged=int(640 * t)) for t in (1.0, 2.0)]
    run = open_run(a_run(tmp_path / "run", records, {"name": "gala"}))
    assert groups.bytes_per_update(run) == 1280 / (32 * 20)


def test_counts_that_are_unknown_or_no_numbers_do_not_break_a_page(tmp_path: Path) -> None:
    records = [line(t, 0, updates=None, bytes_exchanged=10) for t in (1.0, 2.0)]
    assert groups.bytes_per_update(open_run(a_run(tmp_path / "null", records, {"name": "gala"}))) is None
    records = [line(1.0, 0, bytes_exchanged=10), line(2.0, 0, joined_replicas="all", bytes_exchanged=10)]
    folder = a_run(tmp_path / "text", records, {"name": "gala"})
    with pytest.warns(UserWarning, match="left out 1 damaged of 2 lines"):
        assert groups.bytes_per_update(open_run(folder)) == 1.0


def test_waiting_counts_between_first_and_last_line(tmp_path: Path) -> None:
    records = [line(10, 0, waiting_seconds=5.0), line(20, 0, waiting_seconds=7.0)]
    records += [line(10, 1, waiting_seconds=1.0), line(30, 1, waiting_seconds=5.0)]
    run = open_run(a_run(tmp_path / "run", records, {"name": "all-reduce"}))
    assert groups.waiting_share(run) == pytest.approx((2 + 4) / (10 + 20))
    (alone,) = grouped([open_run(a_run(tmp_path / "one", [line(10, 0)], {"name": "all-reduce"}))])
    assert groups.waiting_share(alone.runs[0]) is None


def test_a_replica_that_is_started_again_counts_from_0_again(tmp_path: Path) -> None:
    """Replica 0 waits for 2 of its first 10 seconds, and for 3 of those after its restart."""
    lines = [
        line(t, 0, waiting_seconds=waited, bytes_exchanged=exchanged)
        for t, waited, exchanged in ((0.5, 0.0, 0), (10.0, 2.0, 500), (11.0, 0.5, 100), (20.5, 3.0, 700))
    ]
    run = open_run(a_run(tmp_path / "run", lines, {"name": "gala"}, replicas=1))
    assert groups.waiting_share(run) == pytest.approx(5 / 20)
    times = np.array([0.0, 10.0, 11.0, 20.5])
    assert run.total_bytes(times) == pytest.approx([0, 500, 600, 1200])


def test_median_of_counts_is_that_of_the_values() -> None:
    generator = np.random.default_rng(2)
    for size_ in (1, 2, 9, 10, 101):
        values = generator.integers(0, 20, size_)
        expected = sorted(values)[(size_ - 1) // 2]
        assert groups.median(Counter(values.tolist())) == expected
    assert groups.median(Counter()) is None


def test_reference_return_and_when_it_was_reached(tmp_path: Path) -> None:
    def rising(top: float) -> list[dict]:
        return [line(t, 0, return_mean=top * t / 10) for t in (1.0, 10.0)]

    runs = [
        open_run(a_run(tmp_path / name, rising(top), {"name": name}, replicas=1))
        for name, top in (("a", 30.0), ("b", 487.0), ("c", 500.0))
    ]
    found = grouped(runs)
    value, why = groups.reference_return(found)
    assert (value, why) == (480.0, "reached by at least half of the strategies")
    assert groups.reaches(runs[0], value) is None
    assert groups.reaches(runs[2], value) == pytest.approx((960, 9.6), rel=1e-9)
    asked = open_run(a_run(tmp_path / "d", rising(9.0), {"name": "d"}, stop_at_return=400.0))
    assert groups.reference_return(grouped([*runs, asked]))[0] == 400.0
    cells = [row["cells"][5] for row in comparison.table(found)["rows"]]
    assert cells[0] == ("not reached", "")
    assert cells[2] == ("960", "9.6 s")
    negative = [line(1.0, 0, return_mean=-20.7)]
    low = open_run(a_run(tmp_path / "e", negative, {"name": "e"}, replicas=1))
    assert groups.reference_return(grouped([low]))[0] == -21.0
    short = open_run(a_run(tmp_path / "f", [line(1.0, 0, return_mean=3.3)], {"name": "f"}, replicas=1))
    assert groups.reference_return(grouped([short]))[0] == 3.3


def test_returns_are_of_all_replicas_together_and_of_100_episodes(tmp_path: Path) -> None:
    """Four replicas, each with ten episodes a second, whose returns are 1 in second 1, 2 in second 2, ..."""
    records = [
        line(
            float(t), i, env_steps=1000 * t, return_mean=float(t) / 2, episode_returns=[[float(t), 100]] * 10
        )
        for t in range(1, 11)
        for i in range(4)
    ]
    run = open_run(a_run(tmp_path / "run", records, {"name": "gala"}, replicas=4))
    x, y = pooled_returns(run, "time_seconds")
    assert (x[0], y[0], y[4], y[-1]) == (1.0, 1.0, 4.2, 9.2)  # last: 40 tens, 40 nines and 20 eights
    assert len(x) == 10, "a point for the four records of each second"
    x, _ = pooled_returns(run, "time_seconds", full=True)
    assert x[0] == 3.0, "100 episodes have ended in the third second"
    assert groups.reaches(run, 1.5) == (12_000, 3.0), "not before 100 episodes"
    assert groups.reaches(run, 9.2) == (40_000, 10.0)
    assert groups.reaches(run, 9.3) is None
    (group,) = grouped([run])
    assert group.curve("return_mean", "time_seconds").mean[-1] == 9.2
    lucky = [line(1.0, 0, return_mean=500.0, episode_returns=[[500.0, 500]])]
    short = open_run(a_run(tmp_path / "short", lucky, {"name": "gala"}, replicas=1))
    assert groups.reaches(short, 500.0) is None
    assert groups.reference_return(grouped([short])) is None


def test_simulated_runs_have_recorded_the_return_of_all_replicas(tmp_path: Path) -> None:
    records = [
        line(float(t), i, return_mean=10.0 * t, episode_returns=[[99.0, 1]] * 60)
        for t in (1, 2)
        for i in (0, 1)
    ]
    run = open_run(a_run(tmp_path / "run", records, {"name": "gala"}, simulated={}))
    assert pooled_returns(run, "time_seconds")[1].tolist() == [10, 10, 20, 20]
    assert groups.reaches(run, 20.0) == (400, 2.0)


def test_a_comparison_of_real_with_simulated_runs_warns_of_their_bytes(tmp_path: Path) -> None:
    real = open_run(a_run(tmp_path / "real", [line(1.0, 0)], {"name": "gala"}))
    simulated = open_run(a_run(tmp_path / "simulated", [line(1.0, 0)], {"name": "gala"}, simulated={}))
    notes = [comparison.table(grouped(runs))["note"] for runs in ([real, simulated], [real], [simulated])]
    assert ["count the bytes" in note for note in notes] == [True, False, False]


def test_a_few_fast_runs_are_not_ahead_of_more_that_are_slower(tmp_path: Path) -> None:
    """Two of five runs reach 10 in the first second; all five of the other group do in the second."""

    def rising(seconds: float) -> list[dict]:
        return [line(seconds, 0, return_mean=10.0), line(9.0, 0, return_mean=10.0)]

    never = [line(9.0, 0, return_mean=1.0)]
    made = [("some", rising(1.0) if seed < 2 else never, seed) for seed in range(5)]
    made += [("all", rising(2.0), seed) for seed in range(5)]
    runs = [
        open_run(a_run(tmp_path / f"{name}-{seed}", of_seed, {"name": name}, replicas=1, seed=seed))
        for name, of_seed, seed in made
    ]
    some, every = comparison.table(grouped(runs))["rows"]
    # half of the groups: what three of the five runs of "some" reach is 1
    assert some["numbers"]["reached"] == {"return": 1.0, "env_steps": 900, "seconds": 9.0, "runs": 5}
    for run in runs:
        run.run["stop_at_return"] = 10.0
    some, every = comparison.table(grouped(runs))["rows"]
    assert (some["cells"][5], every["cells"][5]) == (("not reached", "2 of 5 runs"), ("200", "2 s"))
    assert some["numbers"]["reached"] == {"return": 10.0, "env_steps": None, "seconds": None, "runs": 2}
    (three,) = comparison.table(grouped(runs[:3]))["rows"]
    assert three["cells"][5] == ("100", "1 s (2 of 3 runs)")


def test_each_environment_has_a_reference_return_of_its_own(tmp_path: Path) -> None:
    worlds = {"a": {"id": "Hopper-v5"}, "b": {"domain": "walker", "task": "run", "pixels": True}}
    runs = [
        open_run(
            a_run(tmp_path / name, [line(10.0, 0, return_mean=top)], {"name": "solo"}, world=worlds[name])
        )
        for name, top in (("a", 1000.0), ("b", 30.0))
    ]
    found = groups.reference_returns(grouped(runs))
    assert {world: value for world, (value, _) in found.items()} == {
        "Hopper-v5": 1000,
        "walker run pixels": 30,
    }
    table = comparison.table(grouped(runs))
    assert ("to a return", "env steps, seconds") in table["heads"]
    assert "Return 30 of walker run pixels: reached" in table["note"]
    assert "not reached" not in [row["cells"][5][0] for row in table["rows"]]


def test_a_peak_of_the_return_is_reached_at_its_env_steps_and_its_time(tmp_path: Path) -> None:
    """Of the points at which curves are computed, one is at the peak by env steps, and none is by time."""
    points = ((1.0, 1000, 0.0), (2.0, 2000, 100.0), (10.0, 4990, 0.0))
    records = [line(t, 0, env_steps=steps, return_mean=mean) for t, steps, mean in points]
    strategy = {"name": "solo"}
    run = open_run(a_run(tmp_path / "run", records, strategy, replicas=1, stop_at_return=100.0))
    (row,) = comparison.table(grouped([run]))["rows"]
    assert row["cells"][5] == ("2,000", "2 s")


def test_the_table_of_a_group_by_hand(tmp_path: Path) -> None:
    for seed, mean in ((0, 19.0), (1, 21.0)):
        folder = tmp_path / str(seed)
        write_run(folder, seconds=300, seed=seed, dead=None)
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {"eval_return_mean": mean}))
    (row,) = comparison.table(grouped([open_run(tmp_path / n) for n in "01"]))["rows"]
    cells = row["cells"]
    assert cells[0] == ("gala", "4 replicas, 2 runs")
    assert cells[1] == ("20 ± 1", "18.25")  # stdev(19, 21) / sqrt(2)
    assert cells[2] == ("600,000", "2,400,000")
    assert cells[7] == ("0", "max 9")
    assert cells[9] == ("8.16 GB", "1.09 MB")  # 4 x 300 x 6.8e6, over 4 x 1875 updates
    assert cells[10] == ("none", "")


def test_classes_cover_all_values_once_and_grow() -> None:
    for largest in (0, 1, 5, 47, 48, 100, 5000):
        edges = classes(largest)
        assert edges[0] == 0
        assert edges[-1] > largest
        widths = np.diff(edges)
        assert (widths > 0).all()
        assert (np.diff(widths) >= 0).all()
        assert len(edges) < 50
    assert [byte_size(v) for v in (0, 512, 20_000, 3.25e6, 8.16e9)] == [
        "0 B",
        "512 B",
        "20 kB",
        "3.25 MB",
        "8.16 GB",
    ]
    assert [tick_text(v) for v in (9999.7, 999_970.0, 9999, -0.02, 0)] == ["10k", "1M", "9999", "−0.02", "0"]
    assert [tick_text(v) for v in (-12_000, -2e6, 3e9)] == ["−12k", "−2M", "3G"]
    assert [byte_size(v) for v in (999.7, 999_700, 999_400, 999_990_000)] == [
        "1 kB",
        "1 MB",
        "999 kB",
        "1 GB",
    ]


def test_the_curve_of_returns_mixes_replicas_whose_records_hold_many_episodes(tmp_path: Path) -> None:
    """Each record has 200 episodes: the last 100 written are all of replica 1."""
    records = [line(1.0, i, return_mean=float(i), episode_returns=[[float(i), 100]] * 200) for i in range(2)]
    run = open_run(a_run(tmp_path / "run", records, {"name": "gala"}))
    (x, y), (_, of_the_last) = (
        pooled_returns(run, "time_seconds"),
        pooled_returns(run, "time_seconds", full=True),
    )
    assert (x.tolist(), y.tolist()) == ([1.0], [0.5])
    assert of_the_last.tolist() == [0.0, 1.0]  # as stop_at_return sees them
