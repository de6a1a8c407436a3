"""Names of config fields on the command line and in files. This module imports little, so that the command
line starts quickly."""

from __future__ import annotations

from typing import Any


def option_name(field_: Any) -> str:
    """The name of a field of a Run, or of a part of it, on the command line and in ``run.json``."""
    return str(field_.metadata.get("option", field_.name))
