"""What the fork server imports for all workers. An import that fails here fails again in the launcher, which
reports it."""

import contextlib
import importlib

with contextlib.suppress(Exception):
    importlib.import_module("murmurate.launch.role")
