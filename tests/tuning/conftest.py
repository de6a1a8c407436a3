"""Fixtures of tests of studies."""

from __future__ import annotations

import dataclasses
import functools
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_runs import SPACE, WORDS, FakeRun, with_options

from murmurate.recipes import recipe
from murmurate.tuning import run_process
from murmurate.tuning import study as study_module
from murmurate.tuning.objective import Objective
from murmurate.tuning.study import Study


@pytest.fixture(autouse=True)
def _without_waiting_for_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``tests/conftest.py`` does for files: each of a trial's many commits would wait for the disk."""
    connect = sqlite3.connect

    def unsynchronised(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    monkeypatch.setattr(sqlite3, "connect", unsynchronised)


@pytest.fixture
def made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Study, list[str], list[FakeRun]]]:
    """A function that makes a study. page: whether it writes its page, whose figures take longer than it."""
    monkeypatch.setattr(run_process, "_POLL_SECONDS", 0.0)

    def make(
        script: Callable, *, page: bool = False, **changes: Any
    ) -> tuple[Study, list[str], list[FakeRun]]:
        if not page:
            monkeypatch.setattr(study_module, "write_page", lambda folder, *_: folder / "report.html")
        said: list[str] = []
        runs: list[FakeRun] = []

        def start(words: Sequence[str], output: Path, threads: int | None) -> FakeRun:
            runs.append(FakeRun(words, output, threads, script))
            return runs[-1]

        monkeypatch.setattr(study_module, "RunProcess", start)
        run = dataclasses.replace(recipe("cartpole-a2c"), env_steps=1000)
        settings = {"trials": 8, "say": said.append, "sampler": "random"} | changes
        objective, folder = Objective("eval_return_mean"), tmp_path / "study"
        space = settings.pop("space", SPACE)
        train = functools.partial(with_options, run)
        made = Study(run, WORDS, [], space, objective, folder, train, **settings)
        return made, said, runs

    return make
