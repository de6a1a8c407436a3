"""System calls of Linux that Python may lack: builds for old systems, as conda's Python 3.11, leave them out.
Other systems do not have them."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import tempfile

_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # their numbers on every architecture that torch supports
_MFD_CLOEXEC = 1  # <linux/memfd.h>


def pidfd_open(pid: int) -> int:
    """A descriptor of the process (Linux 5.3), which can be polled for its end. Raises OSError."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _system_call(_PIDFD_OPEN, pid, 0)


def pidfd_send_signal(descriptor: int, number: signal.Signals) -> None:
    """Send a signal to the process of a descriptor by ``pidfd_open``. Raises OSError."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(descriptor, number)
    else:
        _system_call(_PIDFD_SEND_SIGNAL, descriptor, number, 0, 0)


def memfd(name: str) -> int:
    """The descriptor of a new, empty file without a path, in memory (Linux 3.17). Raises OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    library = _c_library()
    if not hasattr(library, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return _checked(library.memfd_create(name.encode(), ctypes.c_uint(_MFD_CLOEXEC)))


def has_memfd() -> bool:
    """Whether ``memfd`` works here."""
    try:
        os.close(memfd("murmurate"))
    except OSError:
        return False
    return True


def unnamed_file(name: str) -> int:
    """The descriptor of a new, empty file without a path: in memory, or on systems without such files on the
    disk, in the folder of temporary files. Raises OSError."""
    try:
        return memfd(name)
    except OSError:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def _system_call(*arguments: int) -> int:
    library = _c_library()
    library.syscall.restype = ctypes.c_long
    return _checked(library.syscall(*map(ctypes.c_long, arguments)))


def _c_library() -> ctypes.CDLL:
    """The C library. Raises OSError on other systems, whose system calls have other numbers."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
