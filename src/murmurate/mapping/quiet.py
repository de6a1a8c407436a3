"""Starts runs for measurements: with the local launcher, without console output and evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import signal
from pathlib import Path

from murmurate.errors import RunFailed
from murmurate.launch.local import Local
from murmurate.training.coordinator import Coordinator
from murmurate.training.interrupts import signals_restored
from murmurate.training.preflight import preflight, resolved
from murmurate.training.run import Run
from murmurate.training.run_folder import write_run


def started(run: Run, folder: Path) -> Coordinator:
    """Carry out ``run`` in the empty ``folder``. Raises Refusal, or RunFailed with the reason of the
    failure. A signal that stops the run also stops what it is measured for (Ctrl-C: KeyboardInterrupt)."""
    run = resolved(dataclasses.replace(run, strategy=run.learner.adapted(run.strategy)))
    engine = Local()
    preflight(run, engine)
    (folder / "checkpoints").mkdir()
    write_run(folder, run)
    with signals_restored(), contextlib.redirect_stdout(io.StringIO()):
        coordinator = engine.start(run, folder, None)
    if coordinator.interrupted:
        signal.raise_signal(coordinator.signal)
    if coordinator.failure is not None:
        raise RunFailed(str(coordinator.failure)) from coordinator.failure
    return coordinator
