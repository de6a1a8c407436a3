"""``--env`` and ``--algorithm``: what they mean, and how mistakes in them are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from murmurate.cli.main import main
from short_runs import SHORT, refused

FILE = """
from gymnasium.envs.classic_control import CartPoleEnv

def make_env():
    return CartPoleEnv()
"""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--env", "Acrobot-v1"], "--env and --algorithm go together"),
        (["--algorithm", "a2c"], "--env and --algorithm go together"),
        (["--env", "Acrobot-v1", "--algorithm", "a2d"], "no algorithm called 'a2d'. Did you mean 'a2c'"),
        (["--env", "their_envs.py:make_en", "--algorithm", "a2c"], "class or function 'make_en'"),
        (["--env", "their_envs.py", "--algorithm", "a2c"], "is a file. Name the class or function"),
        (["--env", "Acrobot-v9", "--algorithm", "a2c"], "no world called 'Acrobot-v9'"),
        (
            ["cartpole-a2c", "--env", "Acrobot-v1", "--algorithm", "a2c"],
            "'cartpole-a2c' belongs to no option",
        ),
        (
            ["--env", "Acrobot-v1", "--algorithm", "a2c", "--world.frame-stack", "0"],
            "--world.frame-stack",
        ),
        (  # it would not fit into memory
            ["--env", "Acrobot-v1", "--algorithm", "a2c", "--world.frame-stack", "1000000000"],
            "it must be from 1 to 1000",
        ),
        (
            ["--env", "Acrobot-v1", "--algorithm", "a2c", "--world.observe", "eye"],
            "no Dict with the key 'eye'",
        ),
    ],
)
def test_mistakes_are_refused(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_envs.py").write_text(FILE)
    assert sentence in refused(capsys, "train", *words, *SHORT)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["train", "simulate"])
def test_the_order_of_options_does_not_matter(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_envs.py").write_text(FILE)
    words = ["--updates", "2", "--algorithm", "a2c", "--simulators", "2", "--env", "their_envs.py:make_env"]
    extra = ["--launcher", "inline"] if verb == "train" else []
    assert main([verb, *words, *extra, "--eval-episodes", "1"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("their_envs.py-make_env-a2c-")
    stored = json.loads((folder / "run.json").read_text())
    assert stored["world"]["target"] == f"{tmp_path}/their_envs.py:make_env"
    assert stored["updates"] == 2
    assert "Evaluation over 1 games" in capsys.readouterr().out
