"""Runs as they were recorded: means, totals and deaths against ones made by hand."""

from pathlib import Path

import numpy as np
from a_run_folder import write_records

from murmurate.record.runs import open_run


def test_mean_and_totals_against_hand_made_ones(tmp_path: Path) -> None:
    def record(t: float, replica: int, steps: int, value: float) -> dict:
        return {"time_seconds": t, "replica": replica, "env_steps": steps, "updates": 1, "return_mean": value}

    records = [
        record(10, 0, 100, 0.0),
        record(10, 1, 25, 10.0),
        record(20, 1, 50, 10.0),
        record(30, 0, 300, 2.0),
        {"time_seconds": 35, "kind": "event", "event": "died", "member": 1, "replica": None, "message": ""},
        record(50, 0, 500, 4.0),
    ]
    write_records(tmp_path / "run", records, replicas=2, strategy={"name": "gala", "topology": "ring"})
    run = open_run(tmp_path / "run")
    # Replica 0 makes 10 steps a second; replica 1 made 2.5 a second up to its last record at 20 s.
    times = np.array([0.0, 10.0, 15.0, 20.0, 50.0, 60.0])
    np.testing.assert_allclose(run.total_env_steps(times), [0, 125, 187.5, 250, 550, 550])
    np.testing.assert_allclose(run.series("return_mean")[0].total_env_steps, [125, 350, 550])
    x, y = run.mean("return_mean", "time_seconds")
    # Replica 0 is at (t - 10) / 10; until 20 s replica 1 is at 10 beside it, and then it is not counted.
    expected = np.where(x <= 20, ((x - 10) / 10 + 10) / 2, (x - 10) / 10)
    np.testing.assert_allclose(y, expected, atol=1e-9)
    assert run.deaths == {1: 35.0}


def test_a_survivor_that_ended_early_still_counts_in_the_mean(tmp_path: Path) -> None:
    records = [
        {"time_seconds": t, "replica": i, "env_steps": t, "updates": 1, "return_mean": value}
        for t, i, value in ((1, 0, 0.0), (1, 1, 8.0), (2, 1, 8.0), (4, 0, 0.0))
    ]
    write_records(tmp_path / "run", records, replicas=2, strategy={"name": "solo"})
    _, mean = open_run(tmp_path / "run").mean("return_mean", "time_seconds")
    np.testing.assert_allclose(mean, 4.0)


def test_deaths_end_with_a_resume_or_a_return_and_the_summary_has_the_last_word(tmp_path: Path) -> None:
    def event(t: float, name: str, **fields) -> dict:
        fields = {"replica": None, **fields}
        return {"time_seconds": t, "kind": "event", "event": name, "message": "", "env_steps": 0, **fields}

    records = [
        {"time_seconds": t, "replica": i, "env_steps": 80, "updates": 1} for t in (1.0, 9.0) for i in range(4)
    ]
    records += [event(2, "died", member=0), event(3, "resumed"), event(4, "died", member=1)]
    records += [event(5, "joined", member=1), event(6, "died", member=2), event(6.5, "died", member=2)]
    write_records(tmp_path / "run", records, replicas=4, strategy={"name": "gala", "topology": "ring"})
    assert open_run(tmp_path / "run").deaths == {2: 6.0}
    (tmp_path / "run" / "summary.json").write_text('{"dead_replicas": [2, 3]}')
    assert open_run(tmp_path / "run").deaths == {2: 6.0, 3: 9.0}
    (tmp_path / "run" / "summary.json").write_text('{"dead_replicas": [2, 4]}')  # 4 is the centre
    assert open_run(tmp_path / "run").dead_replicas == [2]
