"""The rules of ``CONTRIBUTING.md`` for source files that no linter checks."""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "murmurate"
SOURCES = {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


def test_at_most_eight_modules_lie_at_the_top() -> None:
    top = [path for path in SOURCES if len(path.parts) == 1 and not path.name.startswith("__")]
    assert len(top) <= 8, top


def test_no_file_has_more_than_400_lines() -> None:
    files = [path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    files = [path for path in files if ".venv" not in path.parts]  # environments of peers
    lengths = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in files}
    assert {path: n for path, n in lengths.items() if n > 400} == {}


def test_no_two_classes_have_one_name() -> None:
    modules = defaultdict(list)
    for path, text in SOURCES.items():
        for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
            modules[name].append(str(path))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
