"""A data scientist with a folder of Markdown: topics, a page of them, and a table with a row a file.

Only commands that docs/corpora.md names.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from pathlib import Path

from murmurate.cli.main import main

PAGES = Path(__file__).parents[2] / "docs"
INCLUDING = ("benchmarks.md", "changelog.md", "contributing.md")  # pages without words of their own


def murmurate(*arguments: object) -> str:
    words = [sys.executable, "-m", "murmurate", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def inside(*arguments: object) -> None:
    """The same in this process, which has imported what a command takes seconds to import."""
    assert main([str(argument) for argument in arguments]) == 0


def test_markdown_files_to_a_csv_of_topics_with_file_names(tmp_path: Path) -> None:
    shutil.copytree(PAGES, tmp_path / "pages", ignore=shutil.ignore_patterns("*.svg", "*.png", *INCLUDING))
    (tmp_path / "pages" / "a-code.md").write_text("```\nonly code\n```\n")
    run, table = tmp_path / "run", tmp_path / "topics.csv"
    few = ("--topics", 8, "--batch", 16, "--passes", 6, "--bigrams", "--launcher", "inline")
    murmurate("topics", "fit", tmp_path / "pages", *few, "--out", run)
    assert "npmi" in murmurate("topics", "show", run)
    said = murmurate("topics", "transform", run, tmp_path / "pages", "--out", table)
    assert "without a row: a-code.md" in said

    rows = list(csv.DictReader(table.open(encoding="utf-8", newline="")))
    files = {str(p.relative_to(PAGES)) for p in PAGES.rglob("*.md") if p.name not in INCLUDING}
    assert {row["name"] for row in rows} == files
    for row in rows:
        shares = [float(row[f"topic_{k}"]) for k in range(8)]
        assert abs(sum(shares) - 1) < 1e-4

    # pages about corpora and about their topics are more alike than pages about corpora and chips; a fit with
    # so few passes depends on its seed, so three of them are compared
    tables = [rows]
    for seed in (1, 2):
        again = tmp_path / f"run-{seed}"
        inside("topics", "fit", tmp_path / "pages", *few, "--seed", seed, "--out", again)
        inside("topics", "transform", again, tmp_path / "pages", "--out", table)
        tables.append(list(csv.DictReader(table.open(encoding="utf-8", newline=""))))

    def alike(one: str, other: str) -> float:
        shared = 0.0
        for own_rows in tables:
            by_name = {row["name"]: [float(row[f"topic_{k}"]) for k in range(8)] for row in own_rows}
            shared += sum(min(a, b) for a, b in zip(by_name[one], by_name[other], strict=True))
        return shared / len(tables)

    assert alike("corpora.md", "estimator.md") > alike("corpora.md", "fpga-learner.md")
    page = (run / "topics.html").read_text()
    assert "<svg" in page
    assert any(name in page for name in files)
    assert "How good are they?" in page
