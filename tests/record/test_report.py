"""The page: the right numbers, nothing fetched, sentences for what is lacking, refusals in time."""

import base64
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from a_run_folder import write_records, write_run
from report_pages import data_of, page_of, svgs_of, words_of

from murmurate.errors import Refusal
from murmurate.record.report import report
from murmurate.record.runs import open_run


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
