"""The command, the hosts and the advice of a candidate of a plan."""

from __future__ import annotations

import dataclasses

import pytest

from murmurate.cli.options import change
from murmurate.cli.plan import _words, command, machine
from murmurate.mapping.advice import advice
from murmurate.mapping.candidates import Candidate
from murmurate.mapping.cost import Prediction
from murmurate.mapping.profile import DeviceProfile
from murmurate.recipes import recipe
from murmurate.strategies import strategy
from murmurate.training.run import Run


def candidate(run: Run, *words: str) -> Candidate:
    return Candidate("", run, 1.0, "", "", Prediction(1.0, 1.0, {}, "learner", 1.0, 1.0), [*words])


def test_settings_of_a_strategy_are_left_out_for_another_one() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), strategy=strategy("local-sgd")(period=5))
    for given in (["--strategy.period", "5"], ["--period=5"]):
        rest = [*given, "--simulators", "4"]
        words = _words(run, "local-sgd", rest, candidate(run, "--strategy", "gala", "--replicas", "2"))
        assert words == ["--simulators", "4", "--strategy", "gala", "--replicas", "2"]
        words = _words(run, "local-sgd", rest, candidate(run, "--replicas", "2"))
        assert words == ["--strategy", "local-sgd", *rest, "--replicas", "2"]
        assert change(run, words[2:], "").replicas == 2


def test_what_the_plan_imports_is_part_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    run = recipe("cartpole-a2c")
    monkeypatch.setenv("MURMURATE_IMPORT", "/their/module.py")
    for words in (["--replicas", "2"], ["--strategy", "gala", "--replicas", "2"]):
        assert _words(run, None, [], candidate(run, *words)) == ["--import", "/their/module.py", *words]


def test_several_hosts_get_the_command_of_each() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), replicas=4)
    words = ["--strategy", "gala", "--replicas", "4", "--simulators", "16"]
    assert command(run, candidate(run), words) == f"murmurate train cartpole-a2c {' '.join(words)}"
    said = command(run, candidate(run), [*words, "--launcher=local"], hosts=2)
    assert said == (
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
        "-m murmurate train cartpole-a2c --launcher torchrun --out FOLDER --strategy gala --simulators 16"
    )


def test_the_table_names_all_hosts() -> None:
    assert [machine(2, 1), machine(1, 1), machine(1, 4)] == ["2 cores", "1 core", "4 hosts of 1 core each"]


def test_the_assumed_network_is_named_for_several_hosts_alone() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), replicas=4)
    for hosts, expected in ((1, 0), (2, 1)):
        sentences = advice(candidate(run), DeviceProfile(2), hosts)
        assert sum("network is a guess" in sentence for sentence in sentences) == expected
