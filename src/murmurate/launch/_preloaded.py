"""Imported by the fork server for all workers. An import that fails here is reported by the launcher."""

import contextlib
import importlib

with contextlib.suppress(Exception):
    for name in ("murmurate.launch.role", "torch._dynamo"):  # an optimizer imports the second, for 1.6 s
        importlib.import_module(name)
