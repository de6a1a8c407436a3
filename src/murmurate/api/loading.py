"""``murmurate.load``: the trained model of a run folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from murmurate import recipes
from murmurate.api.fields import in_float32, with_places
from murmurate.api.model import TrainedModel
from murmurate.training.data_record import read_fingerprint
from murmurate.training.own_files import warn_of_changes
from murmurate.training.restore import load_chosen
from murmurate.training.threads import keeping_threads
from murmurate.worlds.own import replaced_by


def load(
    folder: str | os.PathLike[str],
    *,
    best: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    env: str | Callable[..., Any] | None = None,
    world: Mapping[str, object] | None = None,
) -> TrainedModel:
    """The model of a run folder, with the consensus parameters of its last checkpoint.

    Args:
        folder: folder of a run, which may still be going on.
        best: load the checkpoint with the best mean return instead of the last.
        checkpoint: load this one: a copy of the run's ``checkpoints/last``, say, that a callback has made.
        env: makes the environment, where the folder cannot name it (it was a lambda, say); the run that is
            loaded has its name.
        world: for ``evaluate``, where the data are now (``{"path": "new/place"}``), or that broken images are
            to be left out (``{"skip_bad": True}``). The folder stays as it is.

    Raises:
        Refusal: for another field of the world, for ``env`` if no class or function of yours made the
            environment, and if there is no run, no checkpoint, or a checkpoint that does not fit the run.
    """
    run_folder = Path(folder).expanduser()
    with replaced_by(env) as replacement, keeping_threads():
        run = with_places(recipes.relocated(recipes.stored(run_folder), replacement), world or {})
        # loads the user's environment, and raises what is wrong with it before a checkpoint is looked for
        run.world.spec(read_fingerprint(run_folder))
        warn_of_changes(run_folder, run)
        given = None if checkpoint is None else Path(checkpoint).expanduser()
        path, learner = load_chosen(in_float32(run), run_folder, take_best=best, path=given)
        return TrainedModel(run, run_folder, path, learner)
