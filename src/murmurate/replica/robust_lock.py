"""Locks in shared memory that survive the death of their holder: POSIX robust mutexes.

When a thread or process dies while it holds a lock, the kernel gives the lock to the next one that acquires
it (``pthread_mutexattr_setrobust(3)``), which must repair what the dead holder left incomplete.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time

import torch
from torch import Tensor

from murmurate.errors import Refusal

_WORDS = 8  # int64 values of one lock: more than a pthread_mutex_t on any platform, and one cache line
_SHARED = _ROBUST = 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST
_PAUSE_SECONDS = 50e-6

_libc = ctypes.CDLL(None)


def open_locks(count: int) -> Tensor:
    """[count, 8] int64: unlocked locks, to be copied into shared memory.

    Raises Refusal where the C library has no robust mutexes (macOS).
    """
    if not hasattr(_libc, "pthread_mutexattr_setrobust"):
        raise Refusal(
            "A model with row-sparse gradients cannot share its vector here: this system's C library has no "
            "robust mutexes. Use a strategy without shared memory: --strategy gala."
        )
    attributes, mutex = ctypes.create_string_buffer(64), ctypes.create_string_buffer(8 * _WORDS)
    _check(_libc.pthread_mutexattr_init(attributes))
    _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
    _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
    _check(_libc.pthread_mutex_init(mutex, attributes))
    return torch.frombuffer(mutex, dtype=torch.int64).repeat(count, 1)


class RobustLock:
    """One lock of ``open_locks``, at its final address in shared memory. memory: [8] int64."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory  # keeps it mapped
        self._mutex = ctypes.c_void_p(memory.data_ptr())

    def acquire(self, deadline_seconds: float) -> bool:
        """Wait for the lock; returns False if the deadline passed. The previous holder may have died."""
        end = time.monotonic() + deadline_seconds
        while (code := _libc.pthread_mutex_trylock(self._mutex)) == errno.EBUSY:
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE_SECONDS)
        if code == errno.EOWNERDEAD:
            code = _libc.pthread_mutex_consistent(self._mutex)
        _check(code)
        return True

    def release(self) -> None:
        """Release the lock, which this thread must hold."""
        _check(_libc.pthread_mutex_unlock(self._mutex))


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))
