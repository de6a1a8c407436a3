"""A run of the local launcher without console and evaluation: for measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path

from murmurate.errors import RunFailed
from murmurate.launch.local import Local
from murmurate.training.coordinator import Coordinator
from murmurate.training.run import Run
from murmurate.training.run_folder import write_run
from murmurate.training.session import preflight, resolved


def started(run: Run, folder: Path) -> Coordinator:
    """Carry out ``run`` in ``folder``, which is empty. Raises Refusal, and RunFailed with the reason."""
    run = resolved(dataclasses.replace(run, strategy=run.learner.adapted(run.strategy)))
    engine = Local()
    preflight(run, engine)
    (folder / "checkpoints").mkdir()
    write_run(folder, run)
    with contextlib.redirect_stdout(io.StringIO()):
        coordinator = engine.start(run, folder, None)
    if coordinator.failure is not None:
        raise RunFailed(str(coordinator.failure)) from coordinator.failure
    return coordinator
