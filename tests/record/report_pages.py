"""The page of runs, and what is in it."""

import html
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from murmurate.record.report import report


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
