"""The page: the right numbers, nothing fetched, sentences for what is lacking, refusals in time."""

import base64
import html
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from a_run_folder import write_records, write_run

from murmurate.errors import Refusal
from murmurate.record.report import report
from murmurate.record.runs import open_run


def page_of(*folders: Path) -> str:
    return report(list(folders), folders[0].parent / "page.html").read_text(encoding="utf-8")


def data_of(page: str) -> list[dict]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found)["runs"]


def words_of(page: str) -> str:
    """What a person reads: no style, script or tags; figures' texts included."""
    page = re.sub(r"<(style|script).*?</\1>", " ", page, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))


def svgs_of(page: str) -> dict[str, ElementTree.Element]:
    found = {}
    for text in re.findall(r"<svg.*?</svg>", page, re.S):
        element = ElementTree.fromstring(text)  # raises where it is not well formed
        found[element.attrib["aria-label"]] = element
    return found


def write_few_records(folder: Path) -> None:
    """A run whose page has few figures, and is soon made."""
    records = [{"time_seconds": 1.0, "replica": 0, "env_steps": 80, "updates": 1}]
    write_records(folder, records, replicas=1, strategy={"name": "solo"})


@pytest.fixture(scope="module")
def gala(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("gala") / "run"
    write_run(folder)
    return folder, page_of(folder)


def test_headline_numbers_in_words_and_as_data(gala: tuple[Path, str]) -> None:
    folder, page = gala
    summary = json.loads((folder / "summary.json").read_text())
    (data,) = data_of(page)
    assert {key: data[key] for key in summary} == summary
    assert (data["recipe"], data["strategy"], data["replicas"]) == ("pong-gala", "gala", 4)
    words = words_of(page)
    for expected in (
        "evaluation return (greedy) 19.12 ± 0.25 standard error",
        "training return (sampled) 18.25",
        "env steps 3,000,000 12,000,000 frames",
        "wall time 0:25:00",
        "speed 2,000 env steps/s",
        "replicas 4 dead: 2",
        "a processor of 2 cores",
        "4 replicas, gala (topology ring, staleness bound 100)",
        "0:12:30 died replica 2 died (SIGKILL); 3 go on",
        "murmurate train pong-gala --replicas 4 --seed 0",
        "β = 0.707",
        "Mean over all pairs 0.167, over peers 0.250, over others 0.125.",
    ):
        assert expected in words


def test_gradient_cosines_are_averaged_by_pair(gala: tuple[Path, str]) -> None:
    _, page = gala
    expected = [[1.0 if i == j else 0.25 if j == (i - 1) % 4 else 0.125 for j in range(4)] for i in range(4)]
    np.testing.assert_allclose(data_of(page)[0]["gradient_cosine"], expected, rtol=1e-12)
    texts = [t.text.strip() for t in svgs_of(page)["cosines between gradients"].iter("text") if t.text]
    assert texts.count("peer") == 4
    assert texts.count("0.25") == 4
    assert texts.count("1.00") == 4


def test_the_page_fetches_nothing_and_follows_the_theme(gala: tuple[Path, str]) -> None:
    _, page = gala
    assert "http" not in page.replace("http-equiv", "")
    assert not re.search(
        r"<(link|iframe|object|embed|base)\b|@import|<script(?! type=\"application/json\")", page
    )
    assert all(source.startswith("data:") for source in re.findall(r'src="([^"]*)"', page))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))
    colours = {
        c for svg in re.findall(r"<svg.*?</svg>", page, re.S) for c in re.findall(r"#[0-9a-f]{6}\b", svg)
    }
    assert colours <= {"#000000", "#ffffff"}  # all that is drawn has a colour of the page


def test_every_figure_is_there_and_well_formed(gala: tuple[Path, str]) -> None:
    _, page = gala
    assert {
        "return by env steps",
        "return by time",
        "speed",
        "waiting",
        "staleness",
        "distance from consensus and indicator",
        "relative disagreement",
        "cosines between gradients",
        "loss",
        "entropy",
    } <= set(svgs_of(page))
    texts = [t.text for t in svgs_of(page)["return by time"].iter("text")]
    assert "wall time (minutes)" in texts


def test_ids_of_clipping_paths_do_not_collide(gala: tuple[Path, str]) -> None:
    _, page = gala
    ids = re.findall(r'\bid="([^"]*)"', page)
    clips = re.findall(r"<clipPath id=\"([^\"]*)\"", page)
    assert len(set(clips)) == len(clips) > 10
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(ids)


def test_a_run_without_summary_is_told_from_its_records(tmp_path: Path) -> None:
    write_run(tmp_path / "run", seconds=300, summary=False, dead=None)
    page = page_of(tmp_path / "run")
    (data,) = data_of(page)
    assert data["env_steps"] == 4 * 500 * 300
    assert data["wall_seconds"] == 300.0
    assert data["env_steps_per_second"] == 2000.0
    assert data["eval_return_mean"] is None
    assert data["exit"] is None
    last = [h[-1]["return_mean"] for h in open_run(tmp_path / "run").histories.values()]
    assert data["train_return_mean"] == pytest.approx(np.mean(last))
    assert "still running, or killed" in words_of(page)
    assert "evaluation return (greedy)" not in words_of(page)


def test_one_replica_leaves_sections_out_and_says_why(tmp_path: Path) -> None:
    none = frozenset({"disagreement", "distance_to_mean", "gradient_cosine", "staleness"})
    write_run(tmp_path / "run", replicas=1, seconds=60, dead=None, strategy={"name": "solo"}, leave_out=none)
    page = page_of(tmp_path / "run")
    words = words_of(page)
    for sentence in ("no peers to disagree with", "no other gradient", "nothing can be stale"):
        assert sentence in words
    assert not {"staleness", "relative disagreement", "cosines between gradients"} & set(svgs_of(page))
    assert data_of(page)[0]["gradient_cosine"] is None


def test_what_a_short_run_never_probed_names_the_option(tmp_path: Path) -> None:
    none = frozenset({"disagreement", "distance_to_mean", "gradient_cosine"})
    write_run(tmp_path / "run", seconds=60, dead=None, leave_out=none)
    words = words_of(page_of(tmp_path / "run"))
    assert "neither disagreement nor distance_to_mean (every --probe-every-updates" in words
    assert "no cosines between gradients of two replicas (every --probe-every-updates" in words


def test_several_replicas_without_staleness_have_peers_all_the_same(tmp_path: Path) -> None:
    write_run(tmp_path / "run", seconds=60, leave_out=frozenset({"staleness"}))
    words = words_of(page_of(tmp_path / "run"))
    assert "The run recorded no staleness." in words
    assert "nothing can be stale" not in words


def test_no_episode_yet_and_no_command(tmp_path: Path) -> None:
    write_few_records(tmp_path / "run")
    words = words_of(page_of(tmp_path / "run"))
    assert "No episode has ended yet" in words
    assert "murmurate train cartpole-gala --strategy solo --replicas 1 --seed 3" in words
    assert "Put together from run.json" in words


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


def test_a_timeline_and_a_histogram_of_one_run(gala: tuple[Path, str]) -> None:
    _, page = gala
    drawn = svgs_of(page)
    texts = [t.text for t in drawn["timeline"].iter("text")]
    assert {"replica 0", "replica 1", "replica 3"} <= set(texts)
    assert any(text and text.startswith("milliseconds after 7") for text in texts)
    kinds = ElementTree.tostring(drawn["timeline"], encoding="unicode")
    assert all(f"var(--{kind})" in kinds for kind in ("collect", "learn", "exchange", "wait"))
    bars = [t.text for t in drawn["staleness histogram"].iter("text")]
    assert [text for text in bars if text and text.isdigit()] == ["0", "1", "2", "3", "4", "5"]


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


_HEADLINE = {"metric": "m", "title": "M", "label": "m", "text": ""}


def add_to_run(folder: Path, **fields) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def fail_without_records(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("")
    (folder / "summary.json").write_text('{"exit": "failed: no disk."}')


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda d: [p.unlink() for p in d.iterdir()] and d.rmdir(), "There is no folder"),
        (lambda d: (d / "run.json").unlink(), "has no run.json; give a folder that murmurate train wrote"),
        (lambda d: (d / "metrics.jsonl").unlink(), "has no metrics.jsonl"),
        (lambda d: (d / "run.json").write_text('{"name": "x"}'), "names no recipe"),
        (lambda d: (d / "run.json").write_text("[]"), "holds no JSON object"),
        (lambda d: (d / "summary.json").write_text("{"), "cannot be read"),
        (lambda d: add_to_run(d, headline=_HEADLINE | {"spread": ["m"]}), "headline is"),
        (lambda d: (d / "metrics.jsonl").write_text(""), "no records yet; wait .* murmurate resume"),
        (fail_without_records, "no records, as its run failed: no disk. Train anew"),
    ],
)
def test_refuses_what_is_no_run_and_writes_nothing(tmp_path: Path, spoil, sentence: str) -> None:
    write_run(tmp_path / "good", seconds=30)
    write_run(tmp_path / "bad", seconds=30)
    spoil(tmp_path / "bad")
    out = tmp_path / "page.html"
    with pytest.raises(Refusal, match=sentence):
        report([tmp_path / "good", tmp_path / "bad"], out)
    assert not out.exists()


def test_refuses_nothing_to_report_and_nowhere_to_write(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="give one or more run folders"):
        report([], tmp_path / "page.html")
    write_few_records(tmp_path / "run")
    with pytest.raises(Refusal, match=r"Cannot write .* give another file with --out"):
        report([tmp_path / "run"], tmp_path / "nowhere" / "page.html")
    assert report([tmp_path / "run"], tmp_path / "run") == tmp_path / "run" / "report.html"


def test_mean_and_totals_against_hand_made_ones(tmp_path: Path) -> None:
    def record(t: float, replica: int, steps: int, value: float) -> dict:
        return {"time_seconds": t, "replica": replica, "env_steps": steps, "updates": 1, "return_mean": value}

    records = [
        record(10, 0, 100, 0.0),
        record(10, 1, 25, 10.0),
        record(20, 1, 50, 10.0),
        record(30, 0, 300, 2.0),
        {"time_seconds": 35, "kind": "event", "event": "died", "member": 1, "replica": None, "message": ""},
        record(50, 0, 500, 4.0),
    ]
    write_records(tmp_path / "run", records, replicas=2, strategy={"name": "gala", "topology": "ring"})
    run = open_run(tmp_path / "run")
    # Replica 0 makes 10 steps a second; replica 1 made 2.5 a second up to its last record at 20 s.
    times = np.array([0.0, 10.0, 15.0, 20.0, 50.0, 60.0])
    np.testing.assert_allclose(run.total_env_steps(times), [0, 125, 187.5, 250, 550, 550])
    np.testing.assert_allclose(run.series("return_mean")[0].total_env_steps, [125, 350, 550])
    x, y = run.mean("return_mean", "time_seconds")
    # Replica 0 is at (t - 10) / 10; until 20 s replica 1 is at 10 beside it, and then it is not counted.
    expected = np.where(x <= 20, ((x - 10) / 10 + 10) / 2, (x - 10) / 10)
    np.testing.assert_allclose(y, expected, atol=1e-9)
    assert run.deaths == {1: 35.0}


def test_a_survivor_that_ended_early_still_counts_in_the_mean(tmp_path: Path) -> None:
    records = [
        {"time_seconds": t, "replica": i, "env_steps": t, "updates": 1, "return_mean": value}
        for t, i, value in ((1, 0, 0.0), (1, 1, 8.0), (2, 1, 8.0), (4, 0, 0.0))
    ]
    write_records(tmp_path / "run", records, replicas=2, strategy={"name": "solo"})
    _, mean = open_run(tmp_path / "run").mean("return_mean", "time_seconds")
    np.testing.assert_allclose(mean, 4.0)


def test_the_episode_is_embedded_as_it_is_or_its_absence_explained(tmp_path: Path) -> None:
    write_few_records(tmp_path / "run")
    assert "murmurate eval" in words_of(page_of(tmp_path / "run"))
    (tmp_path / "run" / "videos").mkdir()
    out = io.BytesIO()
    matplotlib.image.imsave(out, np.zeros((4, 32, 3), np.uint8), format="png")
    (tmp_path / "run" / "videos" / "frames.png").write_bytes(out.getvalue())
    page = page_of(tmp_path / "run")
    (embedded,) = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    assert base64.b64decode(embedded) == out.getvalue()


def test_deaths_end_with_a_resume_or_a_return_and_the_summary_has_the_last_word(tmp_path: Path) -> None:
    def event(t: float, name: str, **fields) -> dict:
        fields = {"replica": None, **fields}
        return {"time_seconds": t, "kind": "event", "event": name, "message": "", "env_steps": 0, **fields}

    records = [
        {"time_seconds": t, "replica": i, "env_steps": 80, "updates": 1} for t in (1.0, 9.0) for i in range(4)
    ]
    records += [event(2, "died", member=0), event(3, "resumed"), event(4, "died", member=1)]
    records += [event(5, "joined", member=1), event(6, "died", member=2), event(6.5, "died", member=2)]
    write_records(tmp_path / "run", records, replicas=4, strategy={"name": "gala", "topology": "ring"})
    assert open_run(tmp_path / "run").deaths == {2: 6.0}
    (tmp_path / "run" / "summary.json").write_text('{"dead_replicas": [2, 3]}')
    assert open_run(tmp_path / "run").deaths == {2: 6.0, 3: 9.0}
    (tmp_path / "run" / "summary.json").write_text('{"dead_replicas": [2, 4]}')  # 4 is the centre
    assert open_run(tmp_path / "run").dead_replicas == [2]


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


def test_the_page_forbids_scripts_and_everything_from_elsewhere(gala: tuple[Path, str]) -> None:
    _, page = gala
    assert "default-src 'none'" in page
    assert "script-src" not in page
    (script,) = re.findall(r"<script[^>]*>", page)
    assert 'type="application/json"' in script
    assert page.index("Content-Security-Policy") < page.index("<title>")


RUNS = Path(__file__).parents[2] / "benchmarks" / "runs"


def test_every_setting_of_a_run_is_on_its_page(tmp_path: Path) -> None:
    words = words_of(report([RUNS / "pong-gala"], tmp_path / "page.html").read_text(encoding="utf-8"))
    run = json.loads((RUNS / "pong-gala" / "run.json").read_text())
    for part in (run, *(run[name] for name in ("world", "agent", "strategy", "placement"))):
        for name, value in part.items():
            assert name == "command" or value is None or name.replace("_", " ") in words, name
    assert f"staleness bound {run['strategy']['staleness_bound']}" in words
    assert "env steps made" in words


def test_settings_are_printed_in_full_and_measured_figures_rounded(tmp_path: Path) -> None:
    strategy = {"name": "gala", "mixing": 0.99951}
    write_run(tmp_path / "run", seconds=300, strategy=strategy, leave_out=frozenset({"spans"}))
    run, summary = (
        json.loads((tmp_path / "run" / f"{name}.json").read_text()) for name in ("run", "summary")
    )
    agent = {"network": "", "clip": None, "torso": "mlp"}
    run |= {"discount": 0.9997, "rates": [0.00012345, 1.0], "agent": agent}
    (tmp_path / "run" / "run.json").write_text(json.dumps(run))
    (tmp_path / "run" / "summary.json").write_text(json.dumps({**summary, "agreement": 0.98765}))
    words = words_of(page_of(tmp_path / "run"))
    assert words.count("mixing 0.99951") == 2  # in the heading and among the settings
    for expected in (
        "discount 0.9997",
        "rates 0.00012345, 1 ",
        "agreement 0.988 ",
        "network none, clip none, torso mlp",
    ):
        assert expected in words


def test_runs_without_games_are_compared_by_their_own_figure_and_unit(tmp_path: Path) -> None:
    folders = [RUNS / "fashion-resnet20", RUNS / "cifar10-resnet20"]
    words = words_of(report(folders, tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "images/s" in words
    assert "0.947" in words
    assert "0.879" in words
    assert "env steps/s" not in words


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
