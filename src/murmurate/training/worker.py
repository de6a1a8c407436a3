"""A worker's part of a run."""

from __future__ import annotations

from murmurate.training.centre_server import Serving
from murmurate.training.data_record import check_data
from murmurate.training.loop import Learning
from murmurate.training.run import Run
from murmurate.training.worker_context import Post


def work(run: Run, post: Post) -> None:
    """The part of ``post.rank``, from its start to its end.

    Raises Refusal where this process reads another data set than the run began with, as far as that shows
    without reading all of it.
    """
    check_data(post.folder, run.world, thorough=False)
    part(run, post).go()


def part(run: Run, post: Post) -> Learning | Serving:
    """Replicas learn, and the rank after them is the centre."""
    return Learning(run, post) if post.rank < run.replicas else Serving(run, post)
