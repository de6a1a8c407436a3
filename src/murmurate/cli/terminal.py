"""Output that does not fail: in an encoding without some letters, and where the terminal was closed, since a
verb that saves after that has to print."""

from __future__ import annotations

import errno
import io
import signal
import sys
from typing import Any, TextIO


class _Terminal(io.FileIO):
    """A terminal to which nothing is written any more once it is closed."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:  # the error of a terminal that was closed
                raise
            return memoryview(data).nbytes


def escape_unknown_letters() -> None:
    """Make prints escape what the encoding of standard output lacks: a dash in ASCII or Latin-1, or the bytes
    of a path that is not UTF-8. (Standard error does so by itself.)"""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def outlive_terminal() -> None:
    """Make prints to a terminal that has been closed have no effect."""
    if hasattr(signal, "SIGHUP"):  # else the system sends no signal when a terminal is closed
        sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    if stream is None or not stream.isatty():  # None in a process that was started without it
        return stream
    terminal = _Terminal(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(terminal), stream.encoding, stream.errors, line_buffering=True)
