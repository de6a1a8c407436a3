"""Answers ``murmurate bench topics`` with scikit-learn's online LDA (see README.md)."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.decomposition import LatentDirichletAllocation

try:
    from topics_windows import Fit, Rows, Watch, serve
except ImportError as problem:
    raise SystemExit("no topics_windows: set PYTHONPATH to src/murmurate/bench/_windows") from problem


class Watched(LatentDirichletAllocation):
    """Tells after each mini-batch."""

    watch: Watch
    seen = 0

    def _em_step(self, X: Any, *args: Any, **options: Any) -> Any:
        same = super()._em_step(X, *args, **options)
        self.seen += X.shape[0]
        self.watch(self.seen, lambda: self.components_.T)
        return same


def prepare(rows: Rows, options: dict[str, Any]) -> Fit:
    shape = len(rows), rows.vocabulary_size
    counts = csr_matrix((rows.counts.astype(np.float64), rows.words, rows.starts), shape=shape)
    more = {} if options["iterations"] is None else {"max_doc_update_iter": options["iterations"]}

    def fit(watch: Watch) -> None:
        model = Watched(
            n_components=options["topics"],
            doc_topic_prior=options["alpha"],
            topic_word_prior=options["prior"],
            learning_method="online",
            learning_decay=options["forgetting"],
            learning_offset=options["delay"],
            batch_size=options["batch"],
            max_iter=options["passes"],
            evaluate_every=0,
            random_state=options["seed"],
            **more,
        )
        model.watch = watch
        model.fit(counts)

    return fit


if __name__ == "__main__":
    serve("scikit-learn", importlib.metadata.version("scikit-learn"), prepare)
