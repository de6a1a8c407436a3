"""The command ``murmurate``, and ``python -m murmurate``."""

from __future__ import annotations

import atexit
import contextlib
import gc
import signal
import sys
from typing import Any


def main() -> int:
    """Run the command line; returns its exit code, also for a Ctrl-C while it is being imported.

    After it, a Ctrl-C or SIGTERM changes the exit code no more. A second one ends an exit that hangs, for
    example in a thread of an environment.
    """
    atexit.register(_exit_callback)  # the first to be registered is the last to be called
    try:
        from murmurate.cli.main import main as command_line

        code = command_line()
        _handle_signals(_ignore_first)
        return code
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # the terminal may be closed
            print("murmurate: interrupted", file=sys.stderr)
        return 130


def _exit_callback() -> None:
    gc.freeze()  # else the rest of the exit takes 0.6 s to look for garbage among all that torch has made
    _handle_signals(signal.SIG_IGN)


def _ignore_first(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)


def _handle_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
