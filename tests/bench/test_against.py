"""The race against another checkout: its result is one of ``benchmarks/results``."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its trainings have measured three rounds, and nothing else was asked for."""
    spec = importlib.util.spec_from_file_location("against", ROOT / "benchmarks" / "against.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "check", lambda checkout: None)
    for part in ("trainings", "replay", "documents", "copies"):
        measured = [("pong-a2c", 1.1), ("pong-a2c", 0.9), ("pong-a2c", 1.05)] * (part == "trainings")
        monkeypatch.setattr(module, part, lambda *_, measured=measured: iter(measured))
    return module


def test_the_result_is_written_like_those_of_benchmarks(
    against: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", str(other)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    file = tmp_path / "2026-01-02-against.json"
    words = [str(other), "--rounds", "3", "--only", "pong-a2c", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["against.py", *words])
    against.main()
    found = json.loads(file.read_text())
    usual = json.loads((ROOT / "benchmarks/results/2026-11-30-transport.json").read_text())
    assert found["hardware"].keys() == usual["hardware"].keys()
    assert {"bench", "date", "versions"} <= found.keys() & usual.keys()
    assert found["command"] == "python benchmarks/against.py OTHER --rounds 3 --only pong-a2c"
    assert found["other_revision"] == against.revision(other) != found["revision"]
    assert found["ratios"]["pong-a2c"]["median"] == 1.05
    assert found["ratios"]["pong-a2c"]["values"] == [1.1, 0.9, 1.05]
    assert "1.050   (0.900 to 1.100, 3 rounds)" in capsys.readouterr().out
    assert str(tmp_path) not in file.read_text(), "no path of this machine"


def test_a_file_that_cannot_be_written_is_refused_before_the_race(
    against: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["against.py", ".", "--json", str(tmp_path / "none" / "x.json")])
    with pytest.raises(SystemExit):
        against.main()
    assert "Make it, or name another" in capsys.readouterr().err
