"""What others wrote to a run folder is text on the page, and never markup."""

import html
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from a_run_folder import write_records, write_run
from report_pages import data_of, page_of, svgs_of


def test_what_others_wrote_cannot_become_markup(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    records = [
        {"time_seconds": 1.0, "replica": 0, "env_steps": 80, "updates": 1, "loss": 1.0},
        {
            "time_seconds": 2.0,
            "kind": "event",
            "event": "warning",
            "message": evil,
            "replica": 0,
            "env_steps": 80,
        },
    ]
    write_records(tmp_path / "run", records, replicas=1, strategy={"name": "solo"})
    run = json.loads((tmp_path / "run" / "run.json").read_text()) | {"recipe": evil}
    (tmp_path / "run" / "run.json").write_text(json.dumps(run))
    page = page_of(tmp_path / "run")
    assert "<img src=x" not in page
    assert data_of(page)[0]["recipe"] == evil
    assert evil in html.unescape(page)


def test_a_label_of_a_figure_cannot_become_markup(tmp_path: Path) -> None:
    strategy = {"name": 'gala"><script>alert(1)</script>', "topology": "ring"}
    write_run(tmp_path / "a", seconds=60, dead=None, strategy=strategy)
    write_run(tmp_path / "b", seconds=60, dead=None)
    page = page_of(tmp_path / "a", tmp_path / "b")
    assert "<script>" not in page
    assert f"staleness of {strategy['name']}" in svgs_of(page)


class _Markup(HTMLParser):
    """The elements of a page with their attributes' names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str]] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen |= {(tag, name) for name, _ in attrs} | {(tag, "")}


def _markup(page: str) -> set[tuple[str, str]]:
    parser = _Markup()
    parser.feed(page)
    return parser.seen


_EVIL = "\"'--><evil on=1></title></style></script></svg><script>1</script>$x$ &lt;evil&gt; \\"


def _evil(value: object) -> object:
    """``value`` with hostile text in place of, or behind, each of its strings, keys included."""
    if isinstance(value, str):
        return value + _EVIL
    if isinstance(value, list):
        return [_evil(inner) for inner in value]
    return {k: _evil(v) for k, v in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("several", "plays"),
    [
        (False, True),
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_no_element_or_attribute_comes_from_a_run_folder(several: bool, plays: bool, tmp_path: Path) -> None:
    """By default each of one and several runs, of those that play and those that do not, once."""

    def pages(name: str, spoil: Callable[[object], object]) -> str:
        folders = []
        for i in range(1 + several):
            folder = tmp_path / name / f"run{i}"
            write_run(folder, seconds=60, seed=i, strategy={"name": f"gala{i}", "topology": "ring", "x": "y"})
            curve = {"metric": "loss", "title": "Loss", "label": "loss", "text": "words", "digits": "1"}
            run = json.loads((folder / "run.json").read_text()) | {"unit": "documents", "curves": [curve]}
            kept = {"unit": "env steps"} if plays else {}
            for file, more in ((folder / "run.json", {**run, **kept}), (folder / "summary.json", {})):
                stored = {**json.loads(file.read_text()), **more}
                spoilt = {**spoil(stored), **kept, **spoil({f"more{_EVIL}": {"deep": ["er"]}})}
                file.write_text(json.dumps({k: v for k, v in spoilt.items() if k != "checksum"}))
            if not plays:
                run["curves"] = [spoil(curve) | {"metric": "loss"}]
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for line in lines:
                for key in ("event", "message"):
                    if key in line:
                        line[key] = spoil(line[key])
                for span in line.get("spans", ()):
                    span[0] = spoil(span[0]) if spoil is _evil and line["replica"] == 1 else span[0]
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            (folder / "metrics.jsonl").write_text(text)
            if spoil is _evil:
                folder = folder.rename(folder.with_name(f"run{i}{_EVIL.replace('/', ':')}"))
            folders.append(folder)
        return page_of(*folders)

    harmless, page = pages("harmless", lambda value: value), pages("evil", _evil)
    assert "evil on" in html.unescape(page)
    assert _markup(page) - _markup(harmless) == set()
    assert not any(name.startswith("on") for _, name in _markup(page))
    svgs_of(page)
