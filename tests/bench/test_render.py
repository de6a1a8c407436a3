"""The page's tables are made from the result files and nothing else."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")  # as for a script that lies there
    return importlib.import_module("render")


@pytest.fixture
def render_tables(render: ModuleType) -> ModuleType:
    return importlib.import_module("render_tables")


def result(date: str, ratio: float) -> dict[str, Any]:
    return {
        "bench": "cartpole-throughput",
        "date": f"{date}T10:00:00+00:00",
        "hardware": {"cores": 2, "cpu": "a chip"},
        "env_steps_per_cpu_second": 21345.6,
        "ratio_sb3_a2c": ratio,
        "by_simulators": {"8_simulators": {"env_steps_per_cpu_second": {"median": 15000.4}}},
    }


def test_tables_are_newest_first_and_say_what_was_not_measured(
    render: ModuleType, render_tables: ModuleType, tmp_path: Path
) -> None:
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
    assert text.count("No result yet.") == len(render_tables.COLUMNS) + len(render_tables.TABLES) - 1
    render.main(tmp_path)
    assert page.read_text() == text


def test_the_committed_page_is_what_its_results_give(render: ModuleType) -> None:
    results = [json.loads(p.read_text()) for p in (render.HERE / "results").glob("*.json")]
    page = (render.HERE / "README.md").read_text()
    assert render.rewrite(page, render.tables(r for r in results if "bench" in r)) == page


def test_the_figures_in_prose_are_what_their_results_give(render: ModuleType) -> None:
    root, results = render.HERE.parent, render.HERE / "results"
    pages = {path: path.read_text() for path in render.pages(root)}
    assert sum(page.count("<!--figure ") for page in pages.values()) > 50
    stale = [str(path) for path, page in pages.items() if render.with_figures(page, results) != page]
    assert not stale, f"run python benchmarks/render.py: {stale}"


def test_figures_in_prose_by_hand(render: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "2026-01-02-x.json").write_text(
        json.dumps({"a b": [{"c": 0.4567}, {"c": 1234.5}, {"c": None}], "n": 3})
    )

    def shown(marks: str) -> str:
        page: str = render.with_figures(
            f"x <!--figure 2026-01-02-x {marks}-->old\ntext<!--end--> y", tmp_path
        )
        return page.partition("-->")[2].removesuffix("<!--end--> y")

    assert shown("a b.1.c ,.0f") == "1,234"
    assert shown("a b.0.c 100*.1f") == "45.7"
    assert shown("n d") == "3"
    assert shown("a b.1.c / n .1f") == "411.5"
    assert shown("a b.2.c .1f") == "never reached"
    with pytest.raises(KeyError):
        shown("gone .1f")
    with pytest.raises(FileNotFoundError):
        render.with_figures("<!--figure 2026-01-03-x n d--><!--end-->", tmp_path)


def test_a_figure_that_does_not_end_takes_no_prose_with_it(render: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "2026-01-02-x.json").write_text(json.dumps({"n": 3}))
    figure = "<!--figure 2026-01-02-x n d-->"
    with pytest.raises(ValueError, match="2 figures begin, and only 1 end"):
        render.with_figures(f"{figure}1 of these, and {figure}2<!--end--> of those", tmp_path)


def test_a_time_to_a_goal_that_was_missed_is_no_gap(render: ModuleType) -> None:
    schemes = {"hsa2c_B1": {"8_nodes": 5.0}, "da3c": {"8_nodes": 4.0}}
    reached = {"hsa2c_B1": {"195": {"median": None, "reached": 1}}}
    shown = result("2026-05-06", 0.0) | {
        "bench": "hsa2c-scaling",
        "command": "murmurate bench hsa2c-scaling",
        "data_points_per_second": schemes,
        "time_to_score": {"8_nodes": reached},
        "time_to_reference": {"8_nodes": {"seconds_to_reference": {"da3c": None}}},
    }
    lines = render.tables([shown]).splitlines()
    heads = next(line for line in lines if line.startswith("| scheme")).split(" | ")
    rows = {line.split(" | ")[0]: line.split(" | ") for line in lines if line.startswith(("| hsa", "| da3"))}
    missed, old = heads.index("s to 195, 8 nodes (median)"), heads.index("s to B = 1's best return, 8 nodes")
    assert [rows["| hsa2c_B1"][i] for i in (missed, old)] == ["never reached", "not measured"]
    assert [rows["| da3c"][i] for i in (missed, old)] == ["not measured", "never reached"]


def test_a_choice_that_misses_its_target_is_not_unmeasured(render: ModuleType) -> None:
    row = {
        "recipe": "pong-a2c", "target": -15.0, "default_over_choice": 0.0, "choice_over_best": None,
        "choice": "A", "best": "B", "missed": {"as the recipe is": 1, "A": 3, "B": 0},
    }  # fmt: skip
    shown = result("2026-05-06", 0.0) | {
        "bench": "plan-target",
        "command": "murmurate bench plan-target",
        "rows": [row],
    }
    (line,) = (line for line in render.tables([shown]).splitlines() if line.startswith("| pong-a2c, -15 |"))
    assert line.split(" | ")[4:7] == ["0", "never reached", "1, 3, 0"]


def test_a_row_whose_seeds_diverged_is_shown(render: ModuleType) -> None:
    """What ``image_strategies.row`` and ``jin_table.rows`` give where all seeds diverged."""
    facts = {"date": "2026-01-02", "hardware": {"cores": 2, "cpu": "a chip"}, "command": "murmurate bench"}
    lost: dict[str, Any] = {
        **{"strategy": "elastic", "accuracy": None, "deviation": None, "accuracies": [], "test_losses": []},
        **{"disagreements": [], "staleness_max": [], "diverged": 3, "wall_seconds": [10.0, 20.0]},
    }
    page = render.tables([{**facts, "bench": "image-strategies", "rows": [lost]}])
    assert "| elastic, 3 diverged | 0 | not measured |" in page
    lost = {
        **{"task": "pong", "agent": "arm", "env_steps": 1_000, "returns": [], "diverged": 2, "hours": 2.0},
        "train_returns": [None, -20.5],
    }
    page = render.tables([{**facts, "bench": "jin-table", "rows": [lost]}])
    assert "| pong: arm, 2 diverged | 1,000 | none, -20.50 |" in page


def test_every_column_names_a_figure_of_a_real_bench(render_tables: ModuleType) -> None:
    from murmurate.bench import benches

    tabled = {bench.partition(", ")[0] for bench in render_tables.TABLES}  # some have a part by itself
    assert set(render_tables.COLUMNS) | tabled <= set(benches())


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


def test_a_single_world_is_drawn(render: ModuleType, tmp_path: Path) -> None:
    """``python benchmarks/draw_worlds.py OUT.png WORLD``."""
    picture = importlib.import_module("draw_worlds").main(tmp_path / "world.png", ["maze-l5"])
    assert picture.stat().st_size > 1_000
