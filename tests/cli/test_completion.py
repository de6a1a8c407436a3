"""The completion script, in a bash of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from murmurate.cli.main import main

_TRY = """
source ./script
COMP_WORDS=(murmurate {words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_shtab_murmurate
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
_CASES = {
    "verb": ("resu", {"resume"}),
    "inner verb": ("topics tra", {"transform"}),
    "recipe": ("train cartpole-ga", {"cartpole-gala"}),
    "recipes that can be trained": ("train hopper-dq", set()),
    "strategy": ("train pong-a2c --strategy local", {"local-sgd"}),
    "field": ("train pong-a2c --evaluate-e", {"--evaluate-every-env-steps"}),
    "field that may change": ("resume runs/one --checkpoint-every-s", {"--checkpoint-every-seconds"}),
    "run folder": ("eval runs/o", {"runs/one"}),
    "list": ("list strat", {"strategies"}),
    "bench": ("bench cartpole-th", {"cartpole-throughput"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    (folder / "runs" / "one").mkdir(parents=True)
    (folder / "runs" / "one" / "run.json").touch()
    return folder


@pytest.fixture
def script(folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    if not (folder / "script").exists():
        assert main(["completion", "bash"]) == 0
        (folder / "script").write_text(capsys.readouterr().out)
    return folder


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize("case", _CASES)
def test_bash_completes(case: str, script: Path) -> None:
    words, expected = _CASES[case]
    made = subprocess.run(
        ["bash", "-c", _TRY.format(words=words)], cwd=script, capture_output=True, text=True, check=False
    )
    assert set(made.stdout.split()) == expected, made.stderr


def test_zsh_has_a_script_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef murmurate")
    assert "_murmurate_recipes()" in script
    assert "cartpole-gala" in script


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "cmd"]) == 2
    assert "invalid choice: 'cmd'" in capsys.readouterr().err
