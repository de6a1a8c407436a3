"""A new user's own environment, as docs/worlds.md has it: trained, evaluated, resumed and reported."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from user_commands import command

PAGE = (Path(__file__).parents[2] / "docs" / "worlds.md").read_text()
CODE = re.search(r"```python\n(# warehouse\.py\n.*?)```", PAGE, re.DOTALL)
RANDOM_RETURN = 10 * 10 * (1 / 3 + 1 / 4) / 2  # ten orders, ten times the share of what was right


def documented(verb: str) -> list[str]:
    """The words after ``murmurate`` of the page's command with this verb for that environment."""
    line = re.search(rf"^    murmurate ({verb} .*warehouse.*)$", PAGE, re.MULTILINE)
    assert line is not None, verb
    return shlex.split(line[1])


def test_an_own_environment_from_training_to_report(tmp_path: Path) -> None:
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    elsewhere.mkdir()
    assert CODE is not None
    (work / "warehouse.py").write_text(CODE[1])
    command(work, *documented("train"))
    folder = str(work / "runs" / "warehouse")
    verb, _, *options = documented("eval")
    figures = json.loads(command(elsewhere, verb, folder, *options, "--json"))
    assert figures["eval_return_mean"] > 1.5 * RANDOM_RETURN
    verb, _, *options = documented("resume")
    command(elsewhere, verb, folder, *options)
    summary = json.loads((Path(folder) / "summary.json").read_text())
    assert summary["env_steps"] >= 14_000
    assert summary["exit"] == "finished"
    verb, _ = documented("report")
    command(elsewhere, verb, folder)
    page = (Path(folder) / "report.html").read_text()
    assert f"env:{work}/warehouse.py:make_env-a2c" in page
