"""The tutorials: their files are written and their commands run, as a reader would, page by page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fence of a page."""

    language: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in FENCE.findall((TUTORIALS / f"{page}.md").read_text())]


def write_file(block: Block, folder: Path) -> str | None:
    """The file that a block of Python is, by its first line; it is written to ``folder``."""
    name = re.match(r"# (\w+\.py)\n", block.text)
    if name is None:
        return None
    (folder / name[1]).write_text(block.text)
    return name[1]


def patched(diff: str, text: str) -> str:
    """``text`` with the changes of ``diff``, whose lines of context need not all be there."""
    for removed, added in re.findall(r"((?:^-.*\n)*)((?:^\+.*\n)+)", diff, re.MULTILINE):
        new = "".join(line[1:] for line in added.splitlines(keepends=True))
        if removed:
            old = "".join(line[1:] for line in removed.splitlines(keepends=True))
        else:  # after or before the line beside it
            lines = diff.splitlines(keepends=True)
            index = lines.index(added.splitlines(keepends=True)[0])
            beside = lines[index - 1] if index and lines[index - 1].startswith(" ") else lines[index + 1]
            old = beside[1:]
            new = old + new if beside is lines[index - 1] else new + old
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def environment() -> dict[str, str]:
    commands = Path(sys.executable).parent
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "TERM": "dumb",
    }


def run(script: str, folder: Path) -> str:
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=1000
    )
    assert not done.returncode, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def follow(page: str, folder: Path) -> str:
    """Do what a page says; returns all that its commands printed."""
    printed = ""
    for block in blocks(page):
        if block.language == "python":
            write_file(block, folder)
        if block.language == "diff":
            before = (folder / "spirals.py").read_text()
            (folder / "replicated.py").write_text(patched(block.text, before))
        if block.language == "bash":
            printed += run(block.text, folder)
    return printed


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute on a machine with nothing else to do
def test_your_own_environment(tmp_path: Path) -> None:
    printed = follow("own-environment", tmp_path)
    returns = [float(number) for number in re.findall(r"Evaluation over \d+ games: (-?[\d.]+)", printed)]
    assert len(returns) >= 5
    assert max(returns) > -10
    assert min(returns) > -50  # about -85 before it has learned
    assert (tmp_path / "runs" / "thermostat" / "report.html").is_file()
    assert (tmp_path / "runs" / "comparison.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute on a machine with nothing else to do
def test_your_own_loop(tmp_path: Path) -> None:
    printed = follow("own-loop", tmp_path)
    shares = [float(number) for number in re.findall(r"([\d.]+)% of new points are right", printed)]
    assert len(shares) >= 4
    assert min(shares) > 95


def test_five_lines_replicate_the_script() -> None:
    script, diff = (next(b for b in blocks("own-loop") if b.language == kind) for kind in ("python", "diff"))
    replicated = patched(diff.text, script.text)
    assert len(set(replicated.splitlines()) - set(script.text.splitlines())) == 5
    compile(replicated, "replicated.py", "exec")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute on a machine with nothing else to do
def test_compare_strategies(tmp_path: Path) -> None:
    follow("compare-strategies", tmp_path)
    page = (tmp_path / "runs" / "compare.html").read_text()
    assert "3 strategies, 6 runs" in page
    assert (tmp_path / "runs" / "simulated.html").is_file()


def test_every_page_of_the_tutorials_is_followed() -> None:
    pages = {path.stem for path in TUTORIALS.glob("*.md")}
    assert pages == {"own-environment", "own-loop", "compare-strategies"}
    assert all(block.language in ("bash", "python", "diff") for page in pages for block in blocks(page))


def test_what_a_page_shows_of_an_environment_is_one(tmp_path: Path) -> None:
    """The first file and the first command of its page, which has Gymnasium check it."""
    first, check = blocks("own-environment")[:2]
    assert write_file(first, tmp_path) == "thermostat.py"
    run(check.text, tmp_path)
