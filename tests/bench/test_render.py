"""The page's tables are made from the result files and nothing else."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def render() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "render.py"
    spec = importlib.util.spec_from_file_location("render", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(date: str, ratio: float) -> dict[str, Any]:
    return {
        "bench": "cartpole-throughput",
        "date": f"{date}T10:00:00+00:00",
        "hardware": {"cores": 2, "cpu": "a chip"},
        "env_steps_per_cpu_second": 21345.6,
        "ratio_sb3_a2c": ratio,
        "by_simulators": {"8_simulators": {"env_steps_per_cpu_second": {"median": 15000.4}}},
    }


def test_tables_are_newest_first_and_say_what_was_not_measured(render: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{render.BEGIN}\nold numbers\n{render.END}\nafter\n")
    (tmp_path / "results").mkdir()
    for date, ratio in (("2026-01-02", 1.5), ("2026-03-04", 1.75)):
        (tmp_path / "results" / f"{date}-x.json").write_text(json.dumps(result(date, ratio)))
    render.main(tmp_path)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old numbers" not in text
    rows = [line for line in text.splitlines() if line.startswith("| 2026")]
    assert rows == [
        "| 2026-03-04 | 2 x a chip | 21,346 | 1.75 | 15,000 | not measured |",
        "| 2026-01-02 | 2 x a chip | 21,346 | 1.5 | 15,000 | not measured |",
    ]
    assert text.count("No result yet.") == len(render.COLUMNS) + len(render.TABLES) - 1
    render.main(tmp_path)
    assert page.read_text() == text


def test_the_committed_page_is_what_its_results_give(render: ModuleType) -> None:
    results = [json.loads(p.read_text()) for p in (render.HERE / "results").glob("*.json")]
    page = (render.HERE / "README.md").read_text()
    assert render.rewrite(page, render.tables(r for r in results if "bench" in r)) == page


def test_every_column_names_a_figure_of_a_real_bench(render: ModuleType) -> None:
    from murmurate.bench import benches

    tabled = {bench.partition(", ")[0] for bench in render.TABLES}  # some have a part by itself
    assert set(render.COLUMNS) | tabled <= set(benches())


def test_a_row_a_strategy(render: ModuleType) -> None:
    shown = result("2026-05-06", 0.0) | {
        "bench": "straggler",
        "command": "murmurate bench straggler",
        "strategies": {"gala": {"blocked_share": {"median": 0.0}}, "all-reduce": {}},
    }
    text = render.tables([shown])
    assert "2026-05-06, 2 x a chip: `murmurate bench straggler`" in text
    assert "| gala | 0 | not measured |" in text
    assert "| all-reduce | not measured |" in text
