"""The rules of ``CONTRIBUTING.md`` for source files that no linter checks."""

import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "murmurate"
SOURCES = {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


def test_at_most_eight_modules_lie_at_the_top() -> None:
    top = [path for path in SOURCES if len(path.parts) == 1 and not path.name.startswith("__")]
    assert len(top) <= 8, top


def test_no_file_has_more_than_400_lines() -> None:
    assert {str(path): n for path, text in SOURCES.items() if (n := text.count("\n")) > 400} == {}


def test_no_two_classes_have_one_name() -> None:
    modules = defaultdict(list)
    for path, text in SOURCES.items():
        for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
            modules[name].append(str(path))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
