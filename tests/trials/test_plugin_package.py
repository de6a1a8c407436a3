"""The package of CONTRIBUTING.md, word for word: it is found, passes conformance, and learns."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from user_commands import python

pytestmark = pytest.mark.timeout(600)
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page, and what ``pip install -e .`` writes beside them."""
    folder = tmp_path_factory.mktemp("package")
    blocks = re.findall(r"^`(\S+\.(?:py|toml))`:\n\n```\w+\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert [name for name, _ in blocks] == [
        "pyproject.toml",
        "my_package/ring_average.py",
        "my_package/clipped.py",
    ]
    for name, content in blocks:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    (folder / "my_package" / "__init__.py").touch()
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = folder / "my_package-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1\n")
    groups = project["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {module}\n" for name, module in entries.items())
        for group, entries in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def said(package: Path, *words: str) -> str:
    paths = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    return python(package, "-m", *words, PYTHONPATH=paths)


def commands() -> list[list[str]]:
    """Those of the page, from the block after the package."""
    (block,) = re.findall(r"^```sh\n(pip install -e .*?)^```$", PAGE.read_text(), re.M | re.S)
    return [re.findall(r'"[^"]*"|\S+', line.partition("#")[0]) for line in block.splitlines()]


def test_the_strategy_is_found(package: Path) -> None:
    _, listing, *_ = commands()
    assert listing == ["murmurate", "list", "strategies"]
    assert "ring-average" in said(package, *listing)


@pytest.mark.slow
def test_they_pass_conformance(package: Path) -> None:
    words = commands()[-1]
    assert words[:3] == ["python", "-m", "pytest"]
    ended = said(package, "pytest", "-q", *(word.strip('"') for word in words[3:]))
    passed = re.search(r"(\d+) passed", ended)
    assert passed, ended
    assert int(passed[1]) > 40


@pytest.mark.slow
def test_the_agent_learns_under_the_strategy(package: Path) -> None:
    training, resume, evaluate, report = commands()[2:6]
    assert training[:2] == ["murmurate", "train"]
    said(package, *training, "--launcher", "inline", "--env-steps", "60000")
    summary = json.loads((package / "runs" / "mine" / "summary.json").read_text())
    assert summary["strategy"] == "ring-average"
    assert summary["eval_return_mean"] > 100, "a policy that does not learn makes about 20"
    for words in (resume, evaluate, report):
        assert words[2] == "runs/mine"
        said(package, *words, *(["--env-steps", "61000"] if words is resume else []))
