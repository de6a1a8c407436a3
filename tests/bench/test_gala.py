"""GALA's table and sweep: what they plan, what is left of it, and how they go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.gala_trainer import SILENT, Trainer, option, plan, save
from murmurate.bench import _gala, _resumable, actor_learners, gala_sweep, gala_table
from murmurate.errors import Refusal, RunFailed
from murmurate.record.reader import read_metrics
from waiting import until

# -- planning ------------------------------------------------------------------------------------------


def test_the_full_plans_are_the_papers() -> None:
    pytest.importorskip("ale_py")
    table, sweep = _gala.jobs(gala_table.FULL), _gala.jobs(gala_sweep.FULL)
    assert len(sweep) == 600  # section 5
    assert len(table) == 6 * 10 * 2
    assert {job.folder for job in table} < {job.folder for job in sweep}
    assert len({job.folder for job in sweep}) == len(sweep)
    # the authors' command: 4 learners with 16 simulators each and 0.0014
    words = table[1].settings()
    assert [option(words, f"--{name}") for name in ("strategy", "replicas", "simulators")] == [
        "gala",
        "4",
        "16",
    ]
    assert float(option(words, "--agent.learning-rate")) == pytest.approx(0.0014)
    assert {job.seed for job in table[:12]} == {0}
    methods = {
        job.method: dict(zip(job.settings()[::2], job.settings()[1::2], strict=True)) for job in table[:2]
    }
    assert {k for k in methods["A2C"] if methods["A2C"][k] != methods["GALA-A2C"][k]} == {"--strategy"}


def test_a_folder_whose_run_had_other_settings_is_refused(tmp_path: Path, trainer: Trainer) -> None:
    job, *_ = _gala.jobs(plan(tmp_path))
    _resumable.train(job.run, SILENT)
    other, *_ = _gala.jobs(plan(tmp_path, eval_episodes=50))
    assert other.folder == job.folder
    with pytest.raises(RunFailed, match=r"--eval-episodes 2; this plan would .* --eval-episodes 50 there"):
        _resumable.train(other.run, SILENT)
    assert len(trainer.commands) == 2  # one for each end of the first plan's run
    _resumable.train(job.run, SILENT)
    job.run.folder.with_name(f"{job.run.folder.name}.settings.json").unlink()
    with pytest.raises(RunFailed, match=r"settings\.json, which says with what settings, is missing"):
        _resumable.train(other.run, SILENT)


def test_simulators_that_learners_cannot_have_equally_are_refused(tmp_path: Path, trainer: Trainer) -> None:
    """Else the row of 30 simulators would be of 28 in the runs."""
    with pytest.raises(Refusal, match=r"4 processes cannot have 30 simulators .* Use --simulators 32"):
        gala_table.measure(plan(tmp_path, learners=4, simulators=(16, 30)), SILENT)
    with pytest.raises(Refusal, match="Use --simulators 33"):
        actor_learners.planned(actor_learners.ActorLearnersPlan(processes=3), "GALA", 0)
    assert not trainer.commands


# -- hours ---------------------------------------------------------------------------------------------


def test_hours_are_for_what_is_left_and_said_before_the_first_run(tmp_path: Path, trainer: Trainer) -> None:
    small = plan(tmp_path)
    field = _gala.jobs(small)
    over, half, cut_off, *_ = field
    _resumable.train(over.run, SILENT)
    _resumable.train(half.run, SILENT)
    for end in half.run.ends:
        half.run.summary_file(end).unlink()
    save(half.folder, 3_000)
    cut_off.folder.mkdir()  # killed before it saved anything: it counts whole
    cost = _resumable.expected([job.run for job in field], SILENT)
    assert cost["env_steps_planned"] == 8 * 4_000
    assert cost["env_steps_left"] == 1_000 + 6 * 4_000
    assert cost["hours"] == pytest.approx(25_000 / 100 / 3600)
    assert cost["hours_by_row"] == pytest.approx(
        {
            "cartpole, A2C, 16 simulators": 4_000 / 100 / 3600,
            "cartpole, GALA-A2C, 16 simulators": 5_000 / 100 / 3600,
            "cartpole, A2C, 32 simulators": 8_000 / 100 / 3600,
            "cartpole, GALA-A2C, 32 simulators": 8_000 / 100 / 3600,
        }
    )
    assert list(cost["env_steps_per_second"].values()) == [100.0] * 4
    said: list[str] = []
    gala_sweep.measure(small, said.append)
    hours = [i for i, line in enumerate(said) if line.startswith("expected: ")]
    runs = [i for i, line in enumerate(said) if ", seed " in line]
    assert len(hours) == 1 + 4
    assert "0.06944 hours for 25,000 env steps left of 32,000" in said[hours[0]]
    assert max(hours) < min(runs)


def test_nothing_is_measured_where_nothing_is_left(tmp_path: Path, trainer: Trainer) -> None:
    small = plan(tmp_path)
    gala_table.measure(small, SILENT)
    commands = len(trainer.commands)
    again = gala_table.measure(small, SILENT)
    assert again["expected"]["hours"] == again["expected"]["env_steps_left"] == 0
    assert again["expected"]["env_steps_per_second"] == {}
    assert (trainer.asked, len(trainer.commands)) == (4, commands)


def test_hours_are_by_the_speed_with_as_many_simulators(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learners of more simulators have larger batches, and are faster."""
    monkeypatch.setattr(
        _resumable, "measured_speed", lambda run: 100.0 if "2x8" in run.folder.name else 200.0
    )
    cost = _resumable.expected([job.run for job in _gala.jobs(plan(tmp_path))], SILENT)
    hours = {label.rsplit(", ")[-1]: row for label, row in cost["hours_by_row"].items()}
    assert hours["16 simulators"] == pytest.approx(8_000 / 100 / 3600)
    assert hours["32 simulators"] == pytest.approx(8_000 / 200 / 3600)


def test_a_sweep_in_which_no_run_could_succeed_is_refused(tmp_path: Path, trainer: Trainer) -> None:
    with pytest.raises(Refusal, match=r"--simulators is 32,64, .* with 16: add 16"):
        gala_sweep.measure(plan(tmp_path, simulators=(32, 64)), SILENT)
    assert not trainer.commands


# -- going on ------------------------------------------------------------------------------------------


def test_one_run_goes_through_all_its_ends(tmp_path: Path, trainer: Trainer) -> None:
    (job, *_) = _gala.jobs(plan(tmp_path))
    facts = _resumable.train(job.run, SILENT)
    assert {end: f["env_steps"] for end, f in facts.items()} == {1_000: 1_000, 4_000: 4_000}
    assert [words[0] for words in trainer.commands] == ["train", "resume"]
    assert trainer.commands[1] == ["resume", str(job.folder), "--env-steps", "4000"]
    assert _resumable.train(job.run, SILENT) == facts
    assert len(trainer.commands) == 2


@pytest.mark.parametrize("stops_after", [0, 1, 2])
def test_a_cut_off_bench_says_how_to_go_on_and_does(
    tmp_path: Path, trainer: Trainer, stops_after: int
) -> None:
    small = plan(tmp_path, seeds=1, simulators=(16,))
    trainer.stops_after = stops_after
    with pytest.raises(RunFailed, match=r"(?s)ended with 130.*continues the run.*Ctrl-C"):
        gala_table.measure(small, SILENT)
    trainer.stops_after = None
    gala_table.measure(small, SILENT)
    # two runs of two ends, and one command more; each run begins once
    assert len(trainer.commands) == 4 + 1
    assert [words[0] for words in trainer.commands].count("train") == 2
    assert trainer.commands[stops_after + 1][0] == "resume"
    assert not list((tmp_path / "runs").glob("*cut-off*"))


def test_a_run_killed_before_it_saved_begins_anew_and_its_rest_is_set_aside(
    tmp_path: Path, trainer: Trainer
) -> None:
    (job, *_) = _gala.jobs(plan(tmp_path))
    job.folder.mkdir(parents=True)
    (job.folder / "run.json").write_text("{}")
    _resumable.train(job.run, SILENT)
    assert trainer.commands[0][0] == "train"
    (aside,) = (tmp_path / "runs").glob("cut-off-*")
    assert (aside / "run.json").exists()


def test_a_run_that_failed_of_something_else_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job, *_) = _gala.jobs(plan(tmp_path))

    def full_disk(words: Sequence[str], told: Path) -> int:
        save(job.folder, 300)
        failed = {"exit": "failed: the disk is full", "env_steps": 300}
        (job.folder / "summary.json").write_text(json.dumps(failed))
        return 1

    monkeypatch.setattr(_resumable, "murmurate", full_disk)
    with pytest.raises(RunFailed, match="ended with 1 before 1,000"):
        _resumable.train(job.run, SILENT)
    assert job.run.summary(1_000) is None
    assert job.run.env_steps_left() == 3_700


@pytest.mark.parametrize(
    ("told", "is_divergence"),
    [
        ("failed: replica 1: the loss of replica 'a2c' is nan at its update 3. A smaller", True),
        ("failed: replica 1: the loss of replica 'a2c' is -inf at its update 3. A smaller", True),
        ("failed: the parameters of replica 'a2c' are not finite at its update 9.", True),
        ("failed: all replicas died; the last checkpoint is kept.", False),
        ("finished", False),
        ("interrupted", False),
    ],
)
def test_only_numbers_that_are_not_finite_are_divergence(told: str, is_divergence: bool) -> None:
    assert _resumable.diverged({"exit": told}) is is_divergence


def test_a_diverged_run_is_over_and_never_tried_again(tmp_path: Path, trainer: Trainer) -> None:
    (job, *_) = _gala.jobs(plan(tmp_path))
    trainer.diverges = job.folder.name
    facts = _resumable.train(job.run, SILENT)
    assert len(trainer.commands) == 1
    assert [_resumable.diverged(f) for f in facts.values()] == [True, True]
    assert job.run.env_steps_left() == 0
    assert _resumable.train(job.run, SILENT) == facts
    assert len(trainer.commands) == 1


# -- for real ------------------------------------------------------------------------------------------

_BENCH = """
import signal, sys
from murmurate.bench import _gala, _resumable
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's child is born deaf to it
plan = _gala.GalaPlan(("cartpole",), 1, (int(sys.argv[1]),), 1, (16,), 1, sys.argv[2])
(job,) = [job for job in _gala.jobs(plan) if job.method == "GALA-A2C"]
_resumable.train(job.run, print)
"""


@pytest.mark.slow
def test_a_real_run_interrupted_by_ctrl_c_is_saved_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = 150_000
    small = plan(tmp_path, env_steps=(end,), learners=1, simulators=(16,), seeds=1, eval_episodes=1)
    (job,) = [job for job in _gala.jobs(small) if job.method == "GALA-A2C"]
    process = subprocess.Popen(
        [sys.executable, "-c", _BENCH, str(end), small.where], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        metrics = job.folder / "metrics.jsonl"

        def begun() -> bool:
            assert process.poll() is None
            return metrics.exists() and any(r.get("env_steps") for r in read_metrics(metrics))

        until(begun, "the first env steps")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) != 0
    finally:
        process.kill()
        process.wait()
    assert json.loads((job.folder / "summary.json").read_text())["exit"] == "interrupted"
    left = job.run.env_steps_left()
    assert 0 < left < end
    commands: list[list[str]] = []

    murmurate = _resumable.murmurate

    def run(words: Sequence[str], output: Path) -> int:
        commands.append(list(words))
        return murmurate(words, output)

    monkeypatch.setattr(_resumable, "murmurate", run)
    facts = _resumable.train(job.run, SILENT)[end]
    assert [words[0] for words in commands] == ["resume"]
    assert facts["env_steps"] >= end
    (resumed,) = [r for r in read_metrics(metrics) if r.get("event") == "resumed"]
    assert f"{end - left:,} env steps" in resumed["message"]
    assert job.run.env_steps_left() == 0
    assert gala_table.ours([facts])["ours_mean"] == facts["eval_return_mean"] > 0
