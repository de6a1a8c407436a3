"""The commands that made a run, for ``run.json``."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from murmurate import plugins
from murmurate.record.stored import UNSOUND, read_object


def commands(folder: Path) -> str | list[str]:
    """What started this process (the command line, or a script or notebook of the user's), in words; for a
    run that is resumed with other settings, in lines: the commands before, and this one. Where the
    environment names modules to import that the words do not, the command sets it."""
    called, *words = sys.argv or [""]
    is_murmurate = Path(called).stem == "murmurate" or Path(called).parent.name == "murmurate"
    command = ["murmurate", *words] if is_murmurate else ["python", called, *words]
    if inherited := plugins.inherited_imports():  # by env, as a quoted assignment is none for a shell
        command = ["env", f"{plugins.IMPORTS}={os.pathsep.join(inherited)}", *command]
    try:
        earlier = read_object(folder / "run.json")["command"]
        lines = earlier if isinstance(earlier, str) else shlex.join(earlier)
    except (OSError, *UNSOUND):  # a new run, or one of a version that did not record the command
        return command
    line = shlex.join(command)
    return lines if f"\n{lines}".endswith(f"\n{line}") else f"{lines}\n{line}"
