"""What a study tries: samplers, grids, and processes that share its trials."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_runs import SPACE, rising

from murmurate.cli.main import main
from murmurate.tuning.space import Dimension
from murmurate.tuning.study import Study
from murmurate.tuning.trials import SAMPLERS, Trials
from short_runs import refused

pytest.importorskip("optuna")


def test_each_sampler_draws_a_second_trial(tmp_path: Path) -> None:
    for sampler in SAMPLERS:
        (tmp_path / sampler).mkdir()
        space = SPACE[1:] if sampler == "grid" else SPACE
        trials = Trials(tmp_path / sampler, space, "maximize", sampler, "none", seed=0)
        for value in (1.0, 2.0):
            held = trials.next(3)
            assert held is not None
            trials.completed(held, value)
            held.release()


def test_a_grid_tries_every_combination_once_and_goes_on(made) -> None:
    space = [
        Dimension("seed", 0, 1, whole=True),
        Dimension("agent.learning-rate", choices=("1e-3", "5e-3")),
        Dimension("agent.steps", choices=("4", "8")),
    ]
    expected = [(seed, rate, n) for seed in ("0", "1") for rate in ("1e-3", "5e-3") for n in ("4", "8")]
    changes = {"space": space, "sampler": "grid", "pruner": "none"}
    fails = iter([False, True])
    first, _, runs = made(lambda rate: ([1.0], int(next(fails, False))), trials=3, **changes)
    assert first.tune() == 0
    second, _, more = made(rising, trials=30, **changes)
    assert second.tune() == 0
    names = [f"--{dimension.name}" for dimension in space]
    tried = [tuple(run.words[run.words.index(name) + 1] for name in names) for run in [*runs, *more]]
    assert tried == expected
    assert len(runs) == 3
    third, _, none = made(rising, trials=30, **changes)
    assert third.tune() == 0
    assert none == []


def test_a_combination_of_a_grid_that_a_killed_process_had_chosen_is_tried(tmp_path: Path) -> None:
    ours, theirs = (Trials(tmp_path, SPACE[1:], "maximize", "grid", "none", seed=0) for _ in range(2))
    ours.study.enqueue_trial({"agent.steps": "4"})
    first, second = theirs.next(9), ours.next(9)
    assert first is not None
    assert second is not None
    assert [held.trial.params for held in (first, second)] == [{"agent.steps": "4"}, {"agent.steps": "8"}]
    assert ours.next(9) is None


def test_a_grid_of_another_objective_still_tries_every_combination(tmp_path: Path) -> None:
    space = [Dimension("agent.steps", choices=tuple(map(str, range(6))))]
    killed = Trials(tmp_path, space, "maximize", "grid", "none", seed=0)
    killed.study.enqueue_trial({"agent.steps": "0"})
    assert killed.renew("minimize")
    renewed, tried = Trials(tmp_path, space, "minimize", "grid", "none", seed=0), []
    while (held := renewed.next(9)) is not None:
        tried.append(held.trial.params["agent.steps"])
    assert tried == list(space[0].choices)


def test_the_command_of_a_grid_tries_all_of_it_and_prunes_none(tmp_path: Path, monkeypatch, capsys) -> None:
    studies: list[Study] = []
    monkeypatch.setattr(Study, "tune", lambda study: studies.append(study) or 0)
    command = ["tune", "cartpole-gala", "--replicas", "2", "--search", "strategy.topology=ring,exponential"]
    words = [*command, "--search", "seed=0..19", "--sampler", "grid", "--out", str(tmp_path / "study")]
    assert main(words) == 0
    (study,) = studies
    assert (study.trials, study.pruner) == (40, "none")
    assert "--trials 40" in study.command
    assert "--pruner none" in study.command
    assert main([*words, "--trials", "3", "--pruner", "halving"]) == 0
    assert (studies[-1].trials, studies[-1].pruner) == (3, "halving")
    assert main([*words, "--pruner", "median"]) == 0
    assert "--pruner median" in studies[-1].command, "without it the command that goes on would prune none"
    capsys.readouterr()
    said = refused(capsys, *words, "--search", "agent.learning-rate=1e-4..1e-2:log")
    assert "Name its values: --search agent.learning-rate=A,B,C" in said
    assert "40,000,000 combinations" in refused(capsys, *words, "--search", "agent.steps=1..1000000")


def test_a_seed_may_be_longer_than_those_of_samplers(tmp_path: Path) -> None:
    trials = Trials(tmp_path, SPACE, "maximize", "random", "none", seed=2**63 - 1)
    held = trials.next(1)
    assert held is not None
    held.release()


def test_processes_share_a_study_and_take_over_what_was_cut_off(tmp_path: Path) -> None:
    ours, theirs = (Trials(tmp_path, SPACE, "maximize", "random", "none", seed=0) for _ in range(2))
    first, second = ours.next(3), theirs.next(3)
    assert first is not None
    assert second is not None
    assert (first.number, second.number) == (0, 1)
    drawn = dict(first.trial.params)
    ours.completed(first, 1.0)
    first.release()
    second.release()  # as the kernel does when its process is killed
    adopted = ours.next(3)
    assert adopted is not None
    assert adopted.number == 1
    assert adopted.trial.params == second.trial.params != drawn
    third = theirs.next(3)
    assert third is not None
    assert third.number == 2
    assert ours.next(3) is None


@pytest.mark.parametrize("name", ["lr?", "50%20 é", "{a}"])
def test_the_database_is_in_the_folder_whatever_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    Trials(tmp_path / name, SPACE, "maximize", "random", "none", seed=0)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert {path.name for path in (tmp_path / name).iterdir()} == {"locks", "study.db"}


def test_another_objective_keeps_the_trials_without_their_values(tmp_path: Path) -> None:
    theirs = Trials(tmp_path, SPACE, "maximize", "random", "none", seed=0)
    failed, cut_off = theirs.next(3), theirs.next(3)
    assert failed is not None
    assert cut_off is not None
    theirs.failed(failed, "nan")
    failed.release()
    cut_off.trial.report(1.0, 1)
    ours = Trials(tmp_path, SPACE, "minimize", "random", "none", seed=0)
    assert not ours.renew("minimize")  # another process trains a trial
    cut_off.release()
    before = ours.all()
    assert ours.renew("minimize")
    ours = Trials(tmp_path, SPACE, "minimize", "random", "none", seed=0)
    assert ours.study.direction.name == "MINIMIZE"
    after = ours.all()
    assert [trial.state.name for trial in after] == ["FAIL", "RUNNING"]
    assert [trial.params for trial in after] == [trial.params for trial in before]
    assert after[0].user_attrs == {"error": "nan"}
    assert [trial.intermediate_values for trial in after] == [{}, {}]
    adopted = ours.next(3)
    assert adopted is not None
    assert adopted.number == 1
    ours.completed(adopted, 2.0)
    assert not ours.renew("maximize")
