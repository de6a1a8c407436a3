"""Figures of the page, of one and of several runs: axes, colours, dashes, and what is left out."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from a_run_folder import write_records, write_run
from report_pages import data_of, page_of, svgs_of, words_of

from murmurate.errors import Refusal
from murmurate.record.report import report


def test_several_runs_share_a_table_and_the_plots(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seconds=300)
    write_run(
        tmp_path / "b", seconds=300, recipe="pong-a2c", strategy={"name": "all-reduce"}, dead=None, seed=1
    )
    page = page_of(tmp_path / "a", tmp_path / "b")
    assert [run["recipe"] for run in data_of(page)] == ["pong-gala", "pong-a2c"]
    words = words_of(page)
    first = "pong-gala, gala 4 replicas 19.12 ± 0.25 18.25 600,000 2,400,000 300 0:05:00 2,000"
    assert first in words
    assert "0 max 9 0.0021 7.11 GB 1.09 MB 1 of 4" in words  # the dead one exchanged until half time
    assert "0 max 9 0.0021 8.16 GB 1.09 MB none" in words


def test_logarithmic_axes_have_several_labels_also_within_a_decade(tmp_path: Path) -> None:
    for name, seconds in (("a", 300), ("b", 12_000)):
        write_run(tmp_path / name, seconds=seconds, every=seconds // 60, dead=None)
    svgs = svgs_of(page_of(tmp_path / "a", tmp_path / "b"))

    def labels(name: str) -> list[str]:
        return ["".join(element.itertext()).strip() for element in svgs[name].iter("text")]

    # from 0.001 to 0.002, which holds one power of ten, and from 136 MB to 326 GB, which holds three
    disagreement = [float(text) for text in labels("disagreement") if text.startswith("0.00")]
    assert len(disagreement) >= 2
    assert len(set(disagreement)) == len(disagreement)
    assert [text for text in labels("return by bytes") if text.endswith("B")] == [
        "1 GB", "10 GB", "100 GB",
    ]  # fmt: skip


def test_strategies_keep_their_colours_in_all_plots(tmp_path: Path) -> None:
    for name, strategy in (("a", "gala"), ("b", "all-reduce")):
        for seed in (0, 1):
            folder = tmp_path / f"{name}{seed}"
            write_run(folder, seconds=300, strategy={"name": strategy}, dead=None, seed=seed)
    page = page_of(*(tmp_path / name for name in ("a0", "b0", "a1", "b1")))
    drawn = {name: ElementTree.tostring(svg, encoding="unicode") for name, svg in svgs_of(page).items()}
    for name in ("return by env steps", "return by time", "return by bytes", "speed", "disagreement"):
        assert drawn[name].count("var(--run0)") == drawn[name].count("var(--run1)") == 2  # a line and a band
        assert "var(--run2)" not in drawn[name]
    assert "var(--run0)" in drawn["staleness of gala"]
    assert "var(--run1)" in drawn["staleness of all-reduce"]
    assert "var(--run1)" not in drawn["staleness of gala"]
    assert {f"timeline of {s}, seed {k}" for s in ("gala", "all-reduce") for k in (0, 1)} <= set(drawn)
    for name in ("return by time", "return by env steps", "return by bytes", "shares of time"):
        assert "var(--accent)" not in drawn[name]
    assert "0.1% waiting, 11.7% exchanging" in words_of(page)  # of the whole run, as in the table
    colours = {
        c for svg in re.findall(r"<svg.*?</svg>", page, re.S) for c in re.findall(r"#[0-9a-f]{6}\b", svg)
    }
    assert colours <= {"#000000", "#ffffff"}


@pytest.mark.parametrize("number", [6, 7])
def test_groups_of_the_same_colour_have_other_dashes_in_all_plots(number: int, tmp_path: Path) -> None:
    headline = {"metric": "eval_return_mean", "title": "Evaluation return", "label": "return", "text": ""}
    folders = [tmp_path / str(i) for i in range(number)]
    for i, folder in enumerate(folders):
        records = [
            {"time_seconds": t, "env_steps": t, "replica": 0, "updates": t, "return_mean": 1.0}
            for t in (1, 2)
        ]
        records += [{**records[1], "replica": None, "kind": "evaluation", "eval_return_mean": 1.0}]
        write_records(folder, records, replicas=1, strategy={"name": f"s{i}"}, headline=headline)
    svgs = svgs_of(page_of(*folders))
    for name in ("return by time", "evaluations by time_seconds", "evaluations by total_env_steps"):
        drawn = ElementTree.tostring(svgs[name], encoding="unicode")
        assert drawn.count("stroke-dasharray") == number - 6  # of the seventh


def test_virtual_seconds_are_the_axis_of_a_simulated_run(tmp_path: Path) -> None:
    records = [
        {
            "time_seconds": 1000 * t,
            "replica": i,
            "env_steps": int(t * 50),
            "updates": int(t * 5),
            "return_mean": 1.0 + t,
            "env_steps_per_second": 50.0,
        }
        for t in (1.0, 2.0, 3.0)
        for i in (0, 1)
    ]
    for name, strategy in (("run", {"name": "gala", "topology": "ring"}), ("other", {"name": "hogwild"})):
        write_records(tmp_path / name, records, replicas=2, strategy=strategy, simulated={"lines": 100})
    (tmp_path / "run" / "summary.json").write_text('{"virtual_seconds": 3000.0, "wall_seconds": 3.0}')
    one = page_of(tmp_path / "run")
    assert "virtual time (minutes)" in [t.text for t in svgs_of(one)["return by time"].iter("text")]
    assert "virtual time 3,000 seconds" in words_of(one)
    both = page_of(tmp_path / "run", tmp_path / "other")
    assert "virtual time (minutes)" in [t.text for t in svgs_of(both)["return by time"].iter("text")]
    assert "3,000 0:50:00 0.1" in words_of(both)  # 300 env steps in 3000 virtual seconds
    # a run without a summary took an unknown wall time, so its speed in that time is unknown too
    assert [run["env_steps_per_second"] for run in data_of(both)] == [None, None]
    assert "virtual ones, of the simulated cluster" in words_of(both)
    write_run(tmp_path / "real", seconds=60)
    mixed = svgs_of(page_of(tmp_path / "run", tmp_path / "real"))["return by time"]
    assert "virtual or wall time (minutes)" in [t.text for t in mixed.iter("text")]


def test_runs_that_exchange_nothing_have_no_figure_by_bytes(tmp_path: Path) -> None:
    none = frozenset({"bytes_exchanged"})
    for name in ("a", "b"):
        write_run(tmp_path / name, recipe=name, replicas=1, seconds=60, dead=None, leave_out=none)
    page = page_of(tmp_path / "a", tmp_path / "b")
    assert "return by bytes" not in svgs_of(page)
    assert "all replicas together and against time." in words_of(page)
    assert "against the bytes" not in words_of(page)


def test_rounding_is_no_disagreement(tmp_path: Path) -> None:
    for name, scale in (("a", 1.0), ("b", 1e-5)):
        write_run(tmp_path / name, seconds=60, strategy={"name": name}, dead=None)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for record in lines:
            if "disagreement" in record:
                record["disagreement"] *= scale
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    assert "0 up to rounding throughout, so not on this axis: b." in words_of(
        page_of(tmp_path / "a", tmp_path / "b")
    )


def test_any_field_of_the_records_is_drawn(tmp_path: Path) -> None:
    for name, periods in (("adaptive", [1.0, 4.0]), ("fixed", None)):
        records = [
            {"time_seconds": t, "replica": 0, "env_steps": 80 * t, "updates": t, "loss": 0.5}
            | ({} if periods is None else {"period": periods[t - 1]})
            for t in (1, 2)
        ]
        write_records(tmp_path / name, records, replicas=1, strategy={"name": name})
    folders, out = [tmp_path / "adaptive", tmp_path / "fixed"], tmp_path / "page.html"
    alone = report(folders[:1], out, metrics=["period", "loss", "loss"]).read_text()
    assert {"period by total_env_steps", "period by time_seconds", "loss by time_seconds"} <= set(
        svgs_of(alone)
    )
    several = report(folders, out, metrics=["period"]).read_text()
    assert "period by total_env_steps" in svgs_of(several)
    assert "Not recorded: fixed." in words_of(several)
    out.unlink()
    with pytest.raises(
        Refusal, match=r"number called 'perod'\. Did you mean 'period'\?.*one of: .*loss, period"
    ):
        report(folders, out, metrics=["perod"])
    assert not out.exists()
