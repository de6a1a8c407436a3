"""What fields of configs are called outside of Python. Imports nothing: the command line begins with it."""

from __future__ import annotations

from typing import Any


def option_name(field_: Any) -> str:
    """What a field of a Run, or of a part of it, is called on the command line and in ``run.json``."""
    return str(field_.metadata.get("option", field_.name))
