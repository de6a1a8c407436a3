"""Help after anything: exit code 0, the options, and a sentence for every field."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from murmurate.bench import benches
from murmurate.cli.help import verbs_of
from murmurate.cli.main import _parser, main
from murmurate.cli.options import options
from murmurate.recipes import pairs, recipe
from murmurate.simulation.cluster import Cluster
from murmurate.strategies import strategies
from murmurate.worlds.registry import families, world


def _verbs(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, verb in verbs_of(parser).items():
        yield from _verbs(verb, (*words, name))


VERBS = list(_verbs(_parser()))


def test_minutes_of_a_simulated_run_are_virtual(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--help"]) == 0
    assert "--minutes are minutes of virtual time here" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_help(verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("-h", "--help"):
        assert main([*verb, word]) == 0
        said = capsys.readouterr()
        assert said.err == ""
        usage = "RECIPE" if verb == ("train",) else " ".join(verb)
        assert said.out.startswith("usage: murmurate")
        assert usage in said.out.splitlines()[0]


@pytest.mark.parametrize(
    "words",
    [
        "train cartpole-gala --out x", "--help train", "train --seed 1 cartpole-gala",
        "train cartpole-gala --out", "eval DIR --episodes", "topics fit CORPUS --topics 5", "fpga pnr --seed",
        "resume DIR --env-steps 5", "simulate cartpole-gala --replicas 9", "plan cartpole-gala",
        "bench cartpole-throughput --json",
    ],
)  # fmt: skip
def test_help_wherever_it_stands(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (f"{words} --help", words.replace(" ", " -h ", 1)):
        assert main(arguments.split()) == 0
        assert capsys.readouterr().out.startswith("usage: ")


def _text(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_without_a_recipe_there_are_the_options_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("train", "simulate", "plan"):
        text = _text(capsys, verb)
        assert f"usage: murmurate {verb} RECIPE" in text
        assert f"murmurate {verb} cartpole-a2c --help" in text
        for field in ("replicas", "env-steps", "checkpoint-every-seconds", "placement.devices"):
            assert f"--{field} " in text
        assert "--agent." not in text
        assert "(default" not in text.partition("options of every run")[2], "a default is a recipe's"
    assert "--network" in _text(capsys, "simulate")


def test_an_empty_default_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = _text(capsys, "train", "cartpole-gala")
    assert "mlflow (MLflow) (default empty)" in text
    assert "(default )" not in text


def test_resume_shows_what_may_change_with_the_values_of_the_run(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["resume"], ["resume", str(run_folder)]):
        text = _text(capsys, *words)
        assert "--env-steps integer or none" in text
        assert "--agent." not in text
        assert "--replicas" not in text
        assert "--seed" not in text
    assert "after which the run ends (default 2; at least 1)" in text, "of this run"


def test_the_usage_of_resume_can_be_copied_to_a_shell(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_folder, spaced := tmp_path / "my run")
    assert f"murmurate resume '{spaced}' [--FIELD VALUE ...]" in _text(capsys, "resume", str(spaced))


def test_a_benchmark_shows_how_much_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    quick, full = (_text(capsys, "bench", "chaos", *more) for more in ([], ["--full"]))
    assert "--replicas integer" in quick
    assert quick != full


def test_an_unknown_recipe_is_named_beside_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cartpole-gal", "--help"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: murmurate train RECIPE")
    assert "Did you mean 'cartpole-gala'?" in said.err


def test_lines_are_not_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in ("72", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["train", "cartpole-gala", "--help"]) == 0
        _, *lines = capsys.readouterr().out.splitlines()
        words = [line for line in lines if " " in line.strip()]
        assert max(len(line) for line in words) <= int(columns)


# -- a sentence for every field --------------------------------------------------------------------------


def _configs() -> Iterator[Any]:
    """A run of each algorithm, each strategy, each kind of world, the cluster and each benchmark."""
    by_algorithm = {algorithm: name for name, (_, algorithm) in pairs().items()}
    yield from map(recipe, by_algorithm.values())
    for kind in strategies().values():
        yield dataclasses.replace(recipe("cartpole-a2c"), strategy=kind())
    for names in families().values():
        yield world(names[0])
    yield Cluster()
    yield from (module.QUICK for module in benches().values())


def test_every_field_has_a_sentence() -> None:
    without = {
        f"{type(config).__name__}: {'.'.join(option.path)}"
        for config in _configs()
        for option in options(config)
        if not option.about
    }
    assert not without, "the docstring of the config says what they are, as in 'name: sentence.'"
