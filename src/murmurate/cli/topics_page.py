"""``murmurate topics show``: the topics as a table, as JSON, and as a page."""

from __future__ import annotations

import argparse
import html
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.table
from rich.text import Text

from murmurate.cli.topics import FittedTopics, OtherCorpus, load, writing
from murmurate.cli.topics_figures import TopicFigure, explained
from murmurate.cli.topics_map import svg_map
from murmurate.errors import Refusal
from murmurate.record.stored import read_object
from murmurate.workloads.topics import Topics

_SIMILAR_DIVERSITY = 0.4  # diversity below which topics are hard to distinguish
_MOST_DOCUMENTS = 20_000  # for coherence and sample documents
_SAMPLE_LETTERS = 220


def show_command(options: argparse.Namespace, rest: list[str]) -> int:
    fitted = load(options.folder)
    weights = fitted.topics.weights().tolist()
    top_words = fitted.topics.top_words(options.words)
    name: Callable[[int], str] = str if fitted.vocabulary is None else fitted.vocabulary.__getitem__
    coherence, samples = _from_corpus(fitted, options.samples)
    rows = [
        {
            "topic": k,
            "weight": weights[k],
            "coherence": coherence[k],
            "words": [{"word": name(word), "share": share} for word, share in top_words[k]],
            "documents": samples[k],
        }
        for k in sorted(range(fitted.topics.count), key=lambda k: -weights[k])
    ]
    page = options.out or options.folder / "topics.html"
    with writing(page) as fresh:
        # a text from JSON may have half of a surrogate pair, which UTF-8 cannot hold
        fresh.write_text(_page(fitted, rows), encoding="utf-8", errors="replace")
    if options.json:
        print(json.dumps(rows))
        return 0
    _print_table(rows)
    _print_diversity(fitted.topics)
    print(f"The page with a map, sample documents and what the figures mean: {page}")
    return 0


def _from_corpus(fitted: FittedTopics, samples: int) -> tuple[list[float | None], list[list[dict[str, Any]]]]:
    """Coherence [K], and the documents with the greatest share of each topic; where the corpus is missing,
    neither, with a warning."""
    count = fitted.topics.count
    try:
        train, _, _ = fitted.divided()
        coherence: list[float | None] = fitted.topics.coherence(
            train.select(range(min(len(train), _MOST_DOCUMENTS)))
        ).tolist()
        return coherence, _samples(fitted, samples)
    except Refusal as refusal:
        warnings.warn(f"no coherence and no sample documents: {refusal}", stacklevel=2)
        return [None] * count, [[] for _ in range(count)]


def _samples(fitted: FittedTopics, most: int) -> list[list[dict[str, Any]]]:
    """For each topic, the documents with the greatest share of it, among up to 20,000. Raises Refusal."""
    if not most:
        return [[] for _ in range(fitted.topics.count)]
    corpus, skipped = fitted.world.read_as()
    texts = fitted.world.texts()
    numbers = OtherCorpus(corpus, skipped, texts).numbers
    sampled = np.unique(np.linspace(0, len(corpus) - 1, min(len(corpus), _MOST_DOCUMENTS)).astype(np.int64))
    shares = fitted.topics.transform(corpus.select(sampled))
    top_rows = np.argsort(-shares, axis=0, kind="stable")[:most].T  # [K, most]
    has_names = texts is not None and texts.has_names
    documents = {} if texts is None else texts.pick(numbers[sampled[top_rows]].ravel().tolist())

    def sample(row: int, topic: int) -> dict[str, Any]:
        number = int(numbers[sampled[row]])
        document = documents.get(number)
        name = document.name if has_names and document is not None else f"document {number}"
        text = "" if document is None else _excerpt(document.text)
        return {"name": name, "share": float(shares[row, topic]), "text": text}

    return [[sample(row, topic) for row in rows] for topic, rows in enumerate(top_rows.tolist())]


def _excerpt(text: str) -> str:
    """The first words of ``text``, or the first letters where it has no spaces."""
    words = " ".join(text.split())
    beginning = words[:_SAMPLE_LETTERS]
    return words if len(words) <= _SAMPLE_LETTERS else f"{beginning.rpartition(' ')[0] or beginning} ..."


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    for column in ("topic", "weight", "npmi", "words"):
        table.add_column(column, justify="left" if column == "words" else "right")
    for row in rows:
        words = Text(" ".join(top["word"] for top in row["words"]))  # which may look like markup
        table.add_row(str(row["topic"]), f"{row['weight']:.1%}", _coherence_text(row["coherence"]), words)
    rich.console.Console().print(table)


def _print_diversity(topics: Topics) -> None:
    """Print how different the topics are, and a remedy where they are similar."""
    diversity = topics.diversity()
    print(f"diversity {diversity:.2f}: the share of different words among the likeliest of the topics")
    if topics.count > 1 and diversity < _SIMILAR_DIVERSITY:
        print(
            "The topics are similar. Use more steps (--passes, a smaller --batch), fewer --topics, or leave "
            "out more of the common words of a text (--max-df 0.3)."
        )


def _coherence_text(coherence: float | None) -> str:
    return "-" if coherence is None else f"{coherence:.2f}"


def _figures(fitted: FittedTopics) -> list[TopicFigure]:
    """The figures in the summary; none before the run has ended."""
    try:
        summary = read_object(fitted.folder / "summary.json")
    except (OSError, ValueError):
        return []
    known = {name: value for name, value in summary.items() if isinstance(value, (int, float))}
    return explained(known, fitted.vocabulary_size)


def _page(fitted: FittedTopics, rows: list[dict[str, Any]]) -> str:
    """An HTML page: a map, then for each topic its weight, its words and documents, and what figures mean."""
    title = f"Topics of {html.escape(Path(fitted.world.path).name)}"
    points, shown = fitted.topics.plane()
    largest_weight = max(row["weight"] for row in rows)
    about = (
        "Topics with similar words are near one another. The area of a circle is the topic's share of all "
        f"words. The two axes show {shown:.0%} of the variance (principal components of Hellinger distances)."
    )
    figures = "".join(
        f"<tr><td>{html.escape(f.name)}</td><td>{f.value}</td><td>{html.escape(f.meaning)}</td></tr>"
        for f in _figures(fitted)
    )
    explanation = f"<h2>How good are they?</h2><table class=figures>{figures}</table>" if figures else ""
    return (
        f"<!doctype html><meta charset=utf-8>{_POLICY}<title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><figure>{svg_map(points, rows)}<figcaption>{about}</figcaption></figure>"
        f"<main>{''.join(_section(row, largest_weight) for row in rows)}</main>{explanation}\n"
    )


def _section(row: dict[str, Any], largest_weight: float) -> str:
    largest_share = max(word["share"] for word in row["words"])
    bars = "".join(
        f"<tr><td>{html.escape(word['word'])}</td>"
        f'<td><i style="width:{8 * word["share"] / largest_share:.2f}em"></i>{word["share"]:.2%}</td></tr>'
        for word in row["words"]
    )
    documents = "".join(
        f"<li><cite>{html.escape(doc['name'])}</cite> {doc['share']:.0%}<br>{html.escape(doc['text'])}</li>"
        for doc in row["documents"]
    )
    caption = f"{row['weight']:.1%} of all words, NPMI {_coherence_text(row['coherence'])}"
    return (
        f"<section id=topic-{row['topic']}><h2>{row['topic']} <small>{caption}</small></h2>"
        f'<b style="width:{100 * row["weight"] / largest_weight:.1f}%"></b><table>{bars}</table>'
        + (f"<h3>Documents</h3><ul>{documents}</ul>" if documents else "")
        + "</section>"
    )


_POLICY = (
    "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(21em, 1fr)); gap: 2em }
h1 { font-weight: 600 } h2 { font-size: 1.05em; margin: 0 } small { font-weight: 400; color: #666 }
h3 { font-size: .85em; margin: .8em 0 .2em; color: #666; font-weight: 600 }
b { display: block; height: 4px; background: #2a6fb0; margin: .3em 0 .5em; border-radius: 2px }
td { padding: 0 .8em 0 0; font-size: .92em; color: #444 } td:first-child { color: #111; min-width: 9em }
i { display: inline-block; height: .7em; background: #9cc3e4; margin-right: .5em; border-radius: 2px }
ul { margin: 0; padding: 0; list-style: none; font-size: .85em; color: #555 } li { margin-bottom: .5em }
li, cite { overflow-wrap: anywhere } cite { color: #111; font-style: normal; font-weight: 600 }
figure { margin: 0 0 2em } figcaption { font-size: .85em; color: #666; max-width: 52em }
svg { width: 100%; max-width: 52em; height: auto; border: 1px solid #ddd; border-radius: 6px }
circle { fill: #2a6fb0; fill-opacity: .3; stroke: #2a6fb0 } a:hover circle { fill-opacity: .55 }
text { font-size: 11px; text-anchor: middle; fill: #222 } text.number { font-weight: 600 }
svg text { paint-order: stroke; stroke: #fff; stroke-width: 3px; stroke-opacity: .75 }
main + h2 { margin: 2em 0 .5em } .figures td { vertical-align: top; padding-bottom: .5em; max-width: 50em }
@media (prefers-color-scheme: dark) { body { background: #16181b; color: #ddd } td { color: #aaa }
  td:first-child, cite { color: #eee } small, h3, figcaption { color: #999 } ul { color: #aaa }
  i { background: #39648a } b { background: #5aa0de } svg { border-color: #444 } text { fill: #ddd }
  svg text { stroke: #16181b }
  circle { fill: #5aa0de; stroke: #5aa0de } }
"""
