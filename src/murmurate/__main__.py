"""The command ``murmurate``, and ``python -m murmurate``."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys


def main() -> int:
    """Run the command line; returns its exit code, also for a Ctrl-C while it is being imported."""
    atexit.register(gc.freeze)  # else the exit takes 0.6 s to look for garbage among all that torch has made
    try:
        from murmurate.cli.main import main as command_line

        return command_line()
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # the terminal may be closed
            print("murmurate: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
