"""Answers ``murmurate bench topics`` with scikit-learn's online LDA (see README.md)."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from scipy.sparse import csr_matrix
from sklearn.decomposition import LatentDirichletAllocation

try:
    from topics_windows import DocumentRows, Fit, Snapshots, serve
except ImportError as problem:
    raise SystemExit("no topics_windows: set PYTHONPATH to src/murmurate/bench/_peer_protocols") from problem


class SnapshotLda(LatentDirichletAllocation):
    """Takes a snapshot after each mini-batch."""

    snapshots: Snapshots
    seen = 0

    def _em_step(self, X: Any, *args: Any, **options: Any) -> Any:
        result = super()._em_step(X, *args, **options)
        self.seen += X.shape[0]
        self.snapshots(self.seen, lambda: self.components_.T)
        return result


def prepare(rows: DocumentRows, options: dict[str, Any]) -> Fit:
    shape = len(rows), rows.vocabulary_size
    precision = options.get("precision", "float64")  # in which it computes
    counts = csr_matrix((rows.counts.astype(precision), rows.words, rows.starts), shape=shape)
    more = {} if options["iterations"] is None else {"max_doc_update_iter": options["iterations"]}

    def fit(snapshots: Snapshots) -> None:
        model = SnapshotLda(
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
        model.snapshots = snapshots
        model.fit(counts)

    return fit


if __name__ == "__main__":
    serve("scikit-learn", importlib.metadata.version("scikit-learn"), prepare)
