"""How tests of the command line make a short run, and look at a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from murmurate.cli.main import main

SHORT = ("--launcher", "inline", "--updates", "2", "--simulators", "2", "--eval-episodes", "1")


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
