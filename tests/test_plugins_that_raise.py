"""Files and modules of a user that raise are named, with what they raised and where."""

from __future__ import annotations

from pathlib import Path

import pytest

import murmurate
from murmurate import plugins
from murmurate.errors import Refusal


@pytest.mark.parametrize("form", ["{folder}/{stem}.py:far", "{stem}:far"])
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("\nx = 1 / 0\n", r"raised ZeroDivisionError: division by zero. Correct line 2 of .*_raises.py"),
        ("import json\n\njson.loads('x')\n", r"raised JSONDecodeError: .* Correct line 3 of .*_raises.py"),
        ("def far(:\n", r"raised SyntaxError: .* Correct it\."),
        ("import sys\nsys.exit(4)\n", r"raised SystemExit: 4. Correct line 2 of .*_raises.py"),
    ],
    ids=["divides", "in a library", "syntax", "exits"],
)
def test_what_it_raised_is_named(
    form: str, source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem = "own_file_that_raises"
    (tmp_path / f"{stem}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = form.format(folder=tmp_path, stem=stem)
    with pytest.raises(ValueError, match=f"(?s){stem}.* of the net .*far {said}"):
        plugins.load_callable(name, "net", "--agent.network")


def test_a_script_that_exits_as_it_is_imported_is_named(tmp_path: Path) -> None:
    """It would end the command without a word."""
    script = tmp_path / "script_that_exits.py"
    script.write_text(
        "def make_env(): raise SystemExit(5)\nif __name__ != 'murmurate_file_kept': raise SystemExit"
    )
    with pytest.raises(Refusal, match=r"script_that_exits.py cannot be imported \(SystemExit: \)"):
        plugins.add_imports([str(script)])
    with pytest.raises(Refusal, match=r"needs the file .*script_that_exits.py, which raised SystemExit"):
        murmurate.train(env=f"{script}:make_env", algorithm="a2c", out=tmp_path / "run")
    kept = script.with_name("kept.py")
    script.rename(kept)
    with pytest.raises(Refusal, match="its function raised SystemExit: 5"):
        murmurate.train(env=f"{kept}:make_env", algorithm="a2c", out=tmp_path / "run")


def test_a_refusal_stays_one(tmp_path: Path) -> None:
    file = tmp_path / "refusing.py"
    file.write_text("from murmurate.errors import Refusal\nraise Refusal('no licence')\n")
    with pytest.raises(Refusal, match="no licence"):
        plugins.function_in_file(f"{file}:far", "net", "--agent.network")
