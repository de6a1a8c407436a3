"""Figures for a paper: the curves of a comparison in JSON, and the page's figures as files."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from a_run_folder import write_records

from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.record.report import report
from murmurate.record.sections import LegendKey, Section
from murmurate.record.standalone import standalone, write_figures

SVG = "{http://www.w3.org/2000/svg}"


def compared(folder: Path) -> list[Path]:
    """Two seeds under gala and two under <solo>, with returns of 10 t and 20 t after 1 to 4 seconds."""
    folders = []
    for name in ("gala", "<solo>"):
        for seed in (0, 1):
            records = [
                {
                    "time_seconds": t,
                    "replica": 0,
                    "env_steps": int(100 * t),
                    "updates": int(t),
                    "episode_returns": [[10.0 * (1 + seed) * t, 10]] * 100,
                    "return_mean": 10.0 * (1 + seed) * t,
                }
                for t in (1.0, 2.0, 3.0, 4.0)
            ]
            evaluated = {"time_seconds": 4.0, "replica": None, "kind": "evaluation", "env_steps": 350}
            records.append(
                evaluated | {"updates": 3, "snapshot_seconds": 3.5, "eval_return_mean": 7.0 + seed}
            )
            folders.append(folder / f"{len(folders)}")
            headline = {"metric": "eval_return_mean", "title": "Return", "label": "return", "text": ""}
            settings = {"seed": seed, "headline": headline, "replicas": 1, "strategy": {"name": name}}
            write_records(folders[-1], records, **settings)
    return folders


def test_the_curves_of_each_run_are_in_json_and_not_in_the_page(tmp_path: Path) -> None:
    folders, file = compared(tmp_path), tmp_path / "numbers.json"
    page = report(folders, tmp_path / "page.html", numbers=file, metrics=["updates"]).read_text()
    numbers = json.loads(file.read_text())
    by_key = {(c["group"], c["metric"], c["axis"]): c for c in numbers["curves"]}
    assert {key[1] for key in by_key} == {"return_mean", "updates"}
    assert {key[2] for key in by_key} == {"total_env_steps", "time_seconds"}, "no bytes were exchanged"
    curve = by_key["gala", "return_mean", "total_env_steps"]
    assert curve["folders"] == [str(folder) for folder in folders[:2]]
    assert (curve["x"][0], curve["x"][-1]) == (100, 400)
    assert curve["y"] == [pytest.approx([0.1 * (1 + seed) * x for x in curve["x"]]) for seed in (0, 1)]
    assert [each["mean"] for each in numbers["evaluations"]] == [[7.0], [8.0], [7.0], [8.0]]
    first = numbers["evaluations"][0]
    assert (first["group"], first["metric"], first["stderr"]) == ("gala", "eval_return_mean", [None])
    assert (first["total_env_steps"], first["time_seconds"]) == ([350], [3.5])
    (embedded,) = re.findall(r'id="data">(.*?)</script>', page)
    assert "curves" not in json.loads(embedded)


def test_the_figures_are_files_that_need_no_page(tmp_path: Path) -> None:
    folders, figures = compared(tmp_path), tmp_path / "paper" / "figures"
    words = ["report", *map(str, folders), "--out", str(tmp_path / "page.html"), "--figures", str(figures)]
    assert main(words) == 0
    names = {path.name for path in figures.iterdir()}
    assert {"return-by-env-steps.svg", "return-by-time.svg", "evaluations-by-time-seconds.svg"} <= names
    for path in figures.iterdir():
        text = path.read_text()
        assert "var(--" not in text
        root = ElementTree.fromstring(text.encode())
        assert root.tag == f"{SVG}svg"
        size = [float(root.attrib[side].removesuffix("pt")) for side in ("width", "height")]
        assert root.attrib["viewBox"] == "0 0 {:g} {:g}".format(*size)
        links = [value for each in root.iter() for key, value in each.attrib.items() if key.endswith("href")]
        assert links == re.findall(r'xlink:href="(#\w+)"', text)
    drawn = ElementTree.fromstring((figures / "return-by-env-steps.svg").read_bytes())
    texts = [element.text for element in drawn.iter(f"{SVG}text")]
    assert texts[-2:] == ["gala", "<solo>"]
    assert main([*words[:-1], str(folders[0] / "run.json")]) == 2


def test_a_legend_has_what_its_figure_shows(tmp_path: Path) -> None:
    keys = [LegendKey("one", "run0", "dashed"), LegendKey("two", "run1"), LegendKey("span", "learn", "block")]
    figure = '<svg aria-label="speed" viewBox="0 0 100 50"><path style="stroke: var(--run0)"/></svg>'
    only = standalone(figure, keys)
    assert 'height="65pt"' in only
    assert ">one</text>" in only
    assert "two" not in only
    assert 'stroke="#0072b2" stroke-width="1.7" stroke-dasharray="8.5 3.4"' in only
    write_figures([Section("a", figures=[figure, "<img>"]), Section("b", figures=[figure])], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speed-2.svg", "speed.svg"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    folders = compared(tmp_path)
    with pytest.raises(Refusal, match="give another folder with --figures"):
        report(folders, tmp_path / "page.html", figures=folders[0] / "run.json")
    assert not (tmp_path / "page.html").exists()
