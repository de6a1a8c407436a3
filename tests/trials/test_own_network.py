"""A new user's own nets, as docs/worlds.md has them: trained, evaluated, resumed, loaded and exported."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import murmurate
from user_commands import command

PAGE = (Path(__file__).parents[2] / "docs" / "worlds.md").read_text()
SECTION = PAGE[PAGE.index("## Your own net") :]
CODE = "\n\n".join(re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL))


def documented(out: str) -> list[str]:
    """The words after ``murmurate`` of the section's command with this folder."""
    line = re.search(rf"^    murmurate (train .*--out {out})$", SECTION, re.MULTILINE)
    assert line is not None, out
    return shlex.split(line[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wide", "shared"])
def test_an_own_net_from_training_to_export(name: str, tmp_path: Path) -> None:
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    elsewhere.mkdir()
    (work / "nets.py").write_text(CODE)
    command(work, *documented(f"runs/{name}"))
    folder = str(work / "runs" / name)
    figures = json.loads(command(elsewhere, "eval", folder, "--episodes", "3", "--json"))
    assert figures["episodes"] == 3
    command(elsewhere, "resume", folder, "--env-steps", "44000" if name == "shared" else "9000")
    command(elsewhere, "report", folder)
    command(elsewhere, "export", folder, "--to", "policy.pt2")
    assert (elsewhere / "policy.pt2").exists()
    model = murmurate.load(folder)
    names = {name for name, _ in model.module.named_parameters()}
    mine = {"wide": "nets.dqn.torso.0.weight", "shared": "nets.a2c.network.policy.weight"}[name]
    assert mine in names
    assert model.act([0.0, 0.0, 0.0, 0.0]) in (0, 1)
