"""Answers ``murmurate bench topics`` with tomotopy's collapsed Gibbs sampler (see README.md)."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import tomotopy

try:
    from topics_windows import DocumentRows, Fit, Snapshots, serve
except ImportError as problem:
    raise SystemExit("no topics_windows: set PYTHONPATH to src/murmurate/bench/_peer_protocols") from problem

SWEEPS = 5  # between two snapshots


def prepare(rows: DocumentRows, options: dict[str, Any]) -> Fit:
    topics, prior = options["topics"], options["prior"]
    model = tomotopy.LDAModel(k=topics, alpha=options["alpha"], eta=prior, seed=options["seed"])
    model.optim_interval = 0  # alpha stays fixed, as for the other libraries
    names = np.array([str(word) for word in range(rows.vocabulary_size)])
    for first, last in zip(rows.starts[:-1], rows.starts[1:], strict=True):
        model.add_doc(np.repeat(names[rows.words[first:last]], rows.counts[first:last]).tolist())

    def matrix() -> np.ndarray:
        counts = np.full((rows.vocabulary_size, topics), prior, np.float32)
        ids = np.array([int(word) for word in model.used_vocabs])
        for k in range(topics):
            counts[ids, k] = model.get_topic_word_dist(k, normalize=False)
        return counts

    def fit(snapshots: Snapshots) -> None:
        for done in range(0, options["passes"], SWEEPS):
            sweeps = min(SWEEPS, options["passes"] - done)
            model.train(sweeps, workers=1)
            snapshots((done + sweeps) * len(rows), matrix)

    return fit


if __name__ == "__main__":
    serve("tomotopy", importlib.metadata.version("tomotopy"), prepare)
