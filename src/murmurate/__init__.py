"""murmurate: write the learner once; how its replicas agree is a part you swap.

For scripts with a loop of their own: ``murmurate.run(main, replicas=4, strategy="gala")``.
"""

from __future__ import annotations

import importlib
from typing import Any

from murmurate.errors import check_system

__version__ = "0.1.0"

# by name, and only when asked for: the command line must not wait for torch
_OWN_LOOP = {
    "run": "murmurate.launch.script",
    "OwnLoop": "murmurate.replicator.user_loop",
    "split_along": "murmurate.replicator.input_split",
}


def __getattr__(name: str) -> Any:
    if name in _OWN_LOOP:
        check_system()
        return getattr(importlib.import_module(_OWN_LOOP[name]), name)
    raise AttributeError(f"module 'murmurate' has no attribute '{name}'")
