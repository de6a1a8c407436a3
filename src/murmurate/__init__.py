"""murmurate: write the learner once, and choose separately how its replicas agree.

``murmurate.train("cartpole-a2c", strategy="gala", replicas=4)`` trains; ``murmurate.load(folder)`` returns
the trained agent, which can act, be evaluated and be exported. A script with a training loop of its own calls
``murmurate.run(main, replicas=4, strategy="gala")``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from murmurate.errors import MissingExtra, Refusal, RunFailed, check_system

if TYPE_CHECKING:
    from murmurate.api.loading import load
    from murmurate.api.model import TrainedModel
    from murmurate.api.runs import recipe, resume, simulate, train
    from murmurate.fabric.processes.spawn import Died
    from murmurate.launch.script import run
    from murmurate.record.callbacks import STOP, Callback, Result
    from murmurate.replicator.input_split import split_along
    from murmurate.replicator.user_loop import OwnLoop
    from murmurate.simulation.cluster import Cluster
    from murmurate.training.run import Run

__version__ = "0.1.0"

__all__ = [
    "STOP",
    "Callback",
    "Cluster",
    "Died",
    "MissingExtra",
    "OwnLoop",
    "Refusal",
    "Result",
    "Run",
    "RunFailed",
    "TrainedModel",
    "load",
    "recipe",
    "resume",
    "run",
    "simulate",
    "split_along",
    "train",
]

# the module of each public name, imported at its first use: the command line must not wait for torch
_PUBLIC = {
    "train": "murmurate.api.runs",
    "resume": "murmurate.api.runs",
    "simulate": "murmurate.api.runs",
    "Cluster": "murmurate.simulation.cluster",
    "recipe": "murmurate.api.runs",
    "load": "murmurate.api.loading",
    "TrainedModel": "murmurate.api.model",
    "Run": "murmurate.training.run",
    "Result": "murmurate.record.callbacks",
    "Callback": "murmurate.record.callbacks",
    "STOP": "murmurate.record.callbacks",
    "run": "murmurate.launch.script",
    "Died": "murmurate.fabric.processes.spawn",
    "OwnLoop": "murmurate.replicator.user_loop",
    "split_along": "murmurate.replicator.input_split",
}


if not TYPE_CHECKING:  # with ``__getattr__``, type checkers would accept any attribute of the module

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            check_system()
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        raise AttributeError(f"module 'murmurate' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
