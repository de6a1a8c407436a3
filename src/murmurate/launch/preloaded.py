"""What the fork server imports for all roles. What cannot be imported the launcher refuses, in a sentence."""

import contextlib
import importlib

with contextlib.suppress(Exception):
    for name in ("murmurate.launch.role", "torch._dynamo"):  # an optimizer imports the second, for 1.6 s
        importlib.import_module(name)
