"""The site: built strictly and without a network, no dead link, no request to anywhere else."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from murmurate import plugins
from murmurate.strategies import strategies

pytest.importorskip("sphinx", reason="extra docs")
pytest.importorskip("myst_nb", reason="extra docs")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LOADS = {"src", "srcset", "data", "poster"}  # attributes of what a browser loads with the page
LOADED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages."""
    out = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-d", str(out / ".doctrees")]
    isolated = ["unshare", "--map-root-user", "--net"]  # where the system allows it: no network at all
    if shutil.which("unshare") and not subprocess.run([*isolated, "true"], capture_output=True).returncode:
        build = [*isolated, *build]
    built = subprocess.run([*build, str(DOCS), str(out)], capture_output=True, text=True, timeout=800)
    assert not built.returncode, built.stderr
    return out


class _Page(HTMLParser):
    """What a page names: ``ids`` of its parts, ``links`` to follow, ``loaded`` with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, pairs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in pairs}
        self.ids |= {attributes[key] for key in ("id", "name") if key in attributes}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag == "link" and LOADED_LINKS & set(attributes.get("rel", "").split()):
            self.loaded.append(attributes["href"])
        self.loaded += [attributes[key] for key in LOADS & attributes.keys()]


@functools.cache
def page(path: Path) -> _Page:
    return _Page(path.read_text())


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def dead(path: Path) -> Iterator[str]:
    """The targets within the site that ``path`` names and that are not there."""
    for target in [*page(path).links, *page(path).loaded]:
        url = urlsplit(target)
        if url.scheme or url.netloc:
            continue
        place = (path.parent / unquote(url.path)).resolve() if url.path else path
        if not place.is_file() or (
            url.fragment and place.suffix == ".html" and unquote(url.fragment) not in page(place).ids
        ):
            yield f"{path.name}: {target}"


def test_no_link_is_dead(site: Path) -> None:
    assert len(pages(site)) > 90
    assert [target for path in pages(site) for target in dead(path)] == []


def test_a_dead_link_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h2 id="there">')
    text = '<a href="other.html#there"><a href="other.html#gone"><a href="gone.html"><img src="gone.png">'
    (tmp_path / "page.html").write_text(text)
    expected = ["other.html#gone", "gone.html", "gone.png"]
    assert list(dead(tmp_path / "page.html")) == [f"page.html: {target}" for target in expected]


def test_pages_and_styles_load_nothing_from_outside(site: Path) -> None:
    loaded = [url for path in pages(site) for url in page(path).loaded]
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    loaded += re.findall(r"""url\(["']?([^"')]+)""", styles) + re.findall(r'@import\s+["\']([^"\']+)', styles)
    assert len(loaded) > 1000
    assert [url for url in loaded if re.match(r"(https?:)?//", url)] == []


def requests_of(pages: list[Path], folder: Path) -> list[str]:
    """The addresses that Chromium asks the network for, to show ``pages`` (each in a frame)."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    loaded = "document.title = 1 + Number(document.title)"
    frames = "".join(f'<iframe src="{path.as_uri()}" onload="{loaded}"></iframe>' for path in pages)
    (folder / "frames.html").write_text(f"<title>0</title>{frames}")
    switches = (
        "--headless=new --no-sandbox --disable-gpu --disable-background-networking --no-first-run "
        "--disable-component-update --disable-sync --disable-default-apps --virtual-time-budget=5000"
    )
    command = [chromium, *switches.split(), "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--log-net-log={folder / 'log.json'}"]
    shown = subprocess.run(
        [*command, (folder / "frames.html").as_uri()], capture_output=True, text=True, timeout=240
    )
    assert f"<title>{len(pages)}</title>" in shown.stdout, shown.stderr
    log = json.loads((folder / "log.json").read_text())
    started = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    asked = [event.get("params", {}) for event in log["events"] if event["type"] == started]
    own = "not an origin"  # the browser itself, not a page
    return [entry["url"] for entry in asked if "url" in entry and entry.get("initiator") != own]


KINDS = ("index", "gallery", "metrics", "algorithms/index", "reference/api", "tutorials/own-loop", "search")


def test_a_browser_asks_for_nothing_from_outside(site: Path, tmp_path: Path) -> None:
    assert requests_of([site / f"{name}.html" for name in KINDS], tmp_path) == []


@pytest.mark.slow
def test_a_browser_asks_for_nothing_from_outside_on_any_page(site: Path, tmp_path: Path) -> None:
    assert requests_of(pages(site), tmp_path) == []


def test_a_request_to_outside_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "inner.html").write_text('<script src="http://outside.example/x.js"></script>')
    assert requests_of([tmp_path / "inner.html"], tmp_path) == ["http://outside.example/x.js"]


def test_every_strategy_and_agent_has_a_page(site: Path) -> None:
    text = (site / "algorithms" / "index.html").read_text()
    link = r'href="[\w-]+\.html"><span class="std std-doc"><code[^>]*><span class="pre">([\w-]+)<'
    named = set(re.findall(link, text))
    agents = {
        vars(kind)["name"]
        for module in plugins.modules("murmurate.agents")
        for kind in vars(module).values()
        if isinstance(kind, type) and {"name", "summary"} <= vars(kind).keys()
        if kind.__module__.startswith("murmurate.agents.")
    }
    own = {name for name, kind in strategies().items() if kind.__module__.startswith("murmurate.")}
    assert "gala" in own
    assert "a2c" in agents
    assert own | agents <= named


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    surface = json.loads((ROOT / "tests" / "golden" / "cli_surface.json").read_text())
    commands = page(site / "reference" / "command-line.html").ids
    assert {f"murmurate-{verb.replace(' ', '-')}" for verb in surface["verbs"]} <= commands
    text = (site / "reference" / "options.html").read_text()
    options = {name for recipe in surface["recipes"].values() for name in recipe}
    options |= {name for strategy in surface["strategies"].values() for name in strategy}
    missing = [name for name in options if f"--{name}<" not in text]
    assert missing == []


def test_the_gallery_has_every_picture() -> None:
    shown = (DOCS / "gallery.md").read_text()
    folders = (DOCS / "pictures", ROOT / "benchmarks" / "figures", ROOT / "benchmarks" / "pictures")
    pictures = [file.name for folder in folders for file in folder.iterdir()]
    assert len(pictures) > 8
    assert [name for name in pictures if f"/{name}" not in shown] == []


def test_formulas_are_drawn_without_a_script(site: Path) -> None:
    text = (site / "metrics.html").read_text()
    assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">' in text
    assert not re.search(r"<script[^>]*mathjax", text, re.IGNORECASE)
