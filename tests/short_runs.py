"""How tests make a short run, by the launcher that it names, and look at a refusal."""

from __future__ import annotations

__all__ = ["SHORT", "altered", "content", "preflight", "refused", "resume", "train"]

from collections.abc import Callable
from pathlib import Path

import pytest

from murmurate.cli.main import main
from murmurate.conformance.smallest import altered
from murmurate.launch import launcher
from murmurate.recipes import stored
from murmurate.training import preflight as checks
from murmurate.training import session
from murmurate.training.run import Run
from murmurate.training.session import Finish

SHORT = ("--launcher", "inline", "--updates", "2", "--simulators", "2", "--eval-episodes", "1")


def preflight(run: Run) -> None:
    checks.preflight(run, launcher(run.launcher))


def train(run: Run, folder: Path) -> Finish:
    return session.train(run, folder, launcher(run.launcher), stored)


def resume(folder: Path, changes: Callable[[Run], Run] = lambda run: run) -> Finish:
    return session.resume(folder, launcher, stored, changes)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one sentence (or two) with which these arguments are refused; nothing may have been made."""
    assert main([str(a) for a in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("murmurate: ")
    return line.removeprefix("murmurate: ")
