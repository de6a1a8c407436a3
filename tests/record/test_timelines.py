"""Which stretch of which burst is shown, and what share of the time each kind had."""

from __future__ import annotations

from pathlib import Path

import pytest
from a_run_folder import write_records, write_run

from murmurate.record.runs import RecordedRun, open_run
from murmurate.record.timelines import SHOWN_MEMBERS, Timeline, bursts, same_length, shares, timeline


def a_run(folder: Path, of: dict[int | None, list[list[list]]], ends: float = 100.0) -> RecordedRun:
    """One whose member i (None: the centre) recorded the bursts ``of[i]``."""
    records = []
    for member, given in of.items():
        kind = {"kind": "centre", "member": 9} if member is None else {}
        common = {"replica": member, "env_steps": 1, "updates": 1, **kind}
        records += [{"time_seconds": burst[-1][1] + 1, **common, "spans": burst} for burst in given]
        records.append({"time_seconds": ends, **common})
    replicas = sum(member is not None for member in of)
    write_records(folder, records, replicas=replicas, strategy={"name": "elastic"})
    return open_run(folder)


def burst(start: float, *, turns: int = 4, wait: float = 0.01) -> list[list]:
    found = []
    for turn in range(turns):
        at = start + turn * 0.1
        found += [["collect", at, 0.05], ["wait", at + 0.05, wait], ["exchange", at + 0.07, 0.02]]
    return found


def test_the_shared_burst_nearest_the_middle_is_shown_where_all_recorded(tmp_path: Path) -> None:
    run = a_run(
        tmp_path / "run",
        {0: [burst(10), burst(40), burst(52)], 1: [burst(10.05), burst(40.05)], None: [burst(40.1)]},
    )
    found = timeline(run)
    assert list(found.members) == ["replica 0", "replica 1", "centre"]
    # it begins where the last of them began, and ends where the first of them ended
    assert found.start_seconds == pytest.approx(40.1)
    assert found.end_seconds == pytest.approx(40.39)
    for spans in found.members.values():
        assert all(found.start_seconds <= s.start and s.end <= found.end_seconds + 1e-9 for s in spans)
    # replica 1 was collecting until 40.10, then waited from 40.10 on
    assert found.members["replica 1"][0].kind == "wait"


def test_long_bursts_are_cut_and_many_members_thinned(tmp_path: Path) -> None:
    run = a_run(
        tmp_path / "run", {i: [burst(50, turns=90)] for i in range(30)} | {None: [burst(50, turns=90)]}
    )
    found = timeline(run)
    assert found.end_seconds - found.start_seconds == pytest.approx(4.0)
    assert len(found.members) == SHOWN_MEMBERS
    assert next(iter(found.members)) == "replica 0"
    assert list(found.members)[-1] == "centre"
    assert found.left_out == 31 - SHOWN_MEMBERS


def test_members_that_took_turns_are_shown_all_the_same(tmp_path: Path) -> None:
    found = timeline(a_run(tmp_path / "run", {0: [burst(50)], 1: [burst(51)]}))
    assert any(found.members.values())
    assert found.end_seconds > found.start_seconds
    assert timeline(a_run(tmp_path / "none", {0: [], 1: []})) is None


def test_shares_add_up_and_leave_the_centre_out(tmp_path: Path) -> None:
    of = {0: [burst(10)], 1: [burst(10, wait=0.0)], None: [burst(10, wait=0.02)]}
    found = shares([a_run(tmp_path / "run", of)])
    assert sum(found.values()) == pytest.approx(1.0)
    # two bursts of 0.39 s, of four turns each
    assert found["collect"] == pytest.approx(8 * 0.05 / 0.78)
    assert found["wait"] == pytest.approx(4 * 0.01 / 0.78)
    assert found["learn"] == 0.0
    # given the whole run's waiting, the others keep their proportions
    given = shares([a_run(tmp_path / "again", of)], 0.25)
    assert given["wait"] == 0.25
    assert sum(given.values()) == pytest.approx(1.0)
    assert given["collect"] / given["other"] == pytest.approx(found["collect"] / found["other"])


def test_windows_of_like_length_get_one_scale(tmp_path: Path) -> None:
    windows = [Timeline(1.0, 1.3, {}, 0), Timeline(5.0, 5.2, {}, 0)]
    assert [w.end_seconds - w.start_seconds for w in same_length(windows)] == pytest.approx([0.2, 0.2])
    assert same_length([*windows, Timeline(0.0, 10.0, {}, 0)])[2].end_seconds == 10.0
    assert same_length([]) == []


def test_bursts_of_a_recorded_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run", seconds=30, dead=None)
    found = bursts(open_run(tmp_path / "run"))
    assert {name: len(mine) for name, mine in found.items()} == {f"replica {i}": 6 for i in range(4)}
    assert shares([open_run(tmp_path / "run")])["wait"] == pytest.approx(0.15)  # 0, 1, 2, 3 ms of 10
