"""Imported by the fork server for all workers. An import that fails here is reported by the launcher."""

import contextlib
import importlib

with contextlib.suppress(Exception):
    importlib.import_module("murmurate.launch.role")
