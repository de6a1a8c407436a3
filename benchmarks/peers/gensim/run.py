"""Answers ``murmurate bench topics`` with gensim's online LDA (see README.md)."""

from __future__ import annotations

import importlib.metadata
from itertools import pairwise
from typing import Any

import numpy as np
from gensim.models import LdaModel

try:
    from topics_windows import DocumentRows, Fit, Snapshots, serve
except ImportError as problem:
    raise SystemExit("no topics_windows: set PYTHONPATH to src/murmurate/bench/_peer_protocols") from problem


class SnapshotLda(LdaModel):
    """Takes a snapshot after each M-step, of which there is one a chunk."""

    def __init__(self, snapshots: Snapshots, **options: Any) -> None:
        self.snapshots, self.seen = snapshots, 0
        super().__init__(**options)

    def do_mstep(self, rho: float, other: Any, extra_pass: bool = False) -> None:
        documents = other.numdocs
        super().do_mstep(rho, other, extra_pass)
        self.seen += documents
        self.snapshots(self.seen, lambda: self.state.get_lambda().T)


def prepare(rows: DocumentRows, options: dict[str, Any]) -> Fit:
    words, counts = rows.words.tolist(), rows.counts.tolist()
    bounds = rows.starts.tolist()
    documents = [
        list(zip(words[first:last], counts[first:last], strict=True)) for first, last in pairwise(bounds)
    ]
    names = {word: str(word) for word in range(rows.vocabulary_size)}
    more = {} if options["iterations"] is None else {"iterations": options["iterations"]}

    def fit(snapshots: Snapshots) -> None:
        SnapshotLda(
            snapshots,
            corpus=documents,
            id2word=names,
            num_topics=options["topics"],
            alpha=np.full(options["topics"], options["alpha"]),
            eta=options["prior"],
            chunksize=options["batch"],
            decay=options["forgetting"],
            offset=options["delay"],
            passes=options["passes"],
            eval_every=None,
            random_state=options["seed"],
            **more,
        )

    return fit


if __name__ == "__main__":
    serve("gensim", importlib.metadata.version("gensim"), prepare)
