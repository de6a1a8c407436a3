"""Pages whose text is in files outside ``docs``, such as CHANGELOG.md, and links to files outside ``docs``.

A page that consists of an ``include`` of such a file gets the file's text, with links relative to the page. A
link to a file that has a page is changed to lead to the page; a link to another file of the repository, to a
copy that is part of the site; a link to a folder or to another Markdown file becomes plain text. A link to a
file that does not exist is a warning, and so an error of a strict build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

_LOG = logging.getLogger(__name__)
_DOCS = Path(__file__).resolve().parents[1]
_ROOT = _DOCS.parent
_PAGES = {  # files and folders -> the page that shows them
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "docs/algorithms": "algorithms/index.md",
    "docs/decisions": "decisions/index.md",
}
_INCLUDE = re.compile(r"^```\{include\} (\S+)\n```\n", re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_CODE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)|^(?: {4}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)


def _rewritten(text: str, file: Path, page: Path) -> str:
    """``text`` of ``file`` with links relative to ``page`` (both absolute paths); code is left as it is."""
    pieces = _CODE.split(text)
    pieces[::2] = [_LINK.sub(lambda link: _link(link, file, page), piece) for piece in pieces[::2]]
    return "".join(pieces)


def _link(link: re.Match[str], file: Path, page: Path) -> str:
    """A link of ``file`` as it is written in ``page``; only its text if the target is not in the site."""
    image, text, target = link.groups()
    path, mark, fragment = target.partition("#")
    if re.match(r"[a-z]+:", target) or not path:
        return link[0]
    place = Path(os.path.normpath(file.parent / path))
    if not place.exists():
        _LOG.warning("%s links to %s, which is not there", file.relative_to(_ROOT), target)
        return text
    name = str(place.relative_to(_ROOT))
    if name in _PAGES:
        place = _DOCS / _PAGES[name]
    elif place.is_dir() or (place.suffix == ".md" and _DOCS not in place.parents):
        return text
    return f"{image}[{text}]({os.path.relpath(place, page.parent)}{mark}{fragment})"


def _other_pages(app: Sphinx, index: str) -> list[str]:
    """The pages of the top folder that the table of contents in ``index`` does not name."""
    return sorted(
        page for page in app.env.found_docs - {"index"} - {*re.findall(r"[\w/-]+", index)} if "/" not in page
    )


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(name))

    def included(include: re.Match[str]) -> str:
        file = (page.parent / include[1]).resolve()
        app.env.note_dependency(str(file))
        return _rewritten(file.read_text(), file, page)

    source[0] = source[0].replace("{{ other pages }}", "\n".join(_other_pages(app, source[0])))
    source[0] = _INCLUDE.sub(included, _rewritten(source[0], page, page))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
