"""Processes that run a module's ``main()``, such as the actors and samplers of a worker.

Where this process has a fork server they are forked from it, so that they do not import torch again.
Elsewhere, and where the fork server has ended or is stopped, they are new interpreters.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing.process
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import IO, Any, Protocol

from murmurate.fabric.processes.fork_server import (
    REPORT_SECONDS,
    UNKNOWN_CODE,
    usable_fork_server,
    using_existing_fork_server,
)
from murmurate.fabric.processes.process_handle import ProcessHandle, is_stopped

_received: dict[int, int] = {}  # in a forked process: its descriptors, by the numbers that its parent has


class ModuleProcess(Protocol):
    """A module's process: the part of ``subprocess.Popen`` that is used."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Inherited(int):
    """A file descriptor of this process which a module's process inherits. There it is unpickled as the
    number that the descriptor has there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _number_here, (int(self),)


def _number_here(number: int) -> int:
    return _received.get(number, number)


def start_module(module: str, descriptors: Sequence[int]) -> ModuleProcess:
    """Run ``module.main()`` in a process that inherits ``descriptors``; send their numbers as ``Inherited``.

    The process writes where this one writes. Its stdin is a pipe, and it must end when that is closed.
    """
    server_pid = usable_fork_server()
    if server_pid is not None and not is_stopped(server_pid):
        with contextlib.suppress(OSError, EOFError):  # it has ended
            return _Forked(module, descriptors)
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        pass_fds=tuple(descriptors),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def end_process(process: ModuleProcess) -> None:
    """Kill the process, wait for its end, and close its stdin."""
    process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # of settings that it did not read before it died
            process.stdin.close()


class _Forked:
    """A process that was forked from the fork server."""

    def __init__(self, module: str, descriptors: Sequence[int]) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        read, write = os.pipe()
        self.stdin: IO[bytes] | None = open(write, "wb")  # noqa: SIM115 - closed by whoever ends the process
        passed = _Passed((read, 1, 2, *descriptors))
        self._process = context.Process(target=_run, args=(module, passed, descriptors, dict(os.environ)))
        try:
            with using_existing_fork_server():
                self._process.start()
        except BaseException:
            self.stdin.close()
            raise
        finally:
            os.close(read)
        # else multiprocessing would wait for it before this process exits
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        self._handle = ProcessHandle(self.pid)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def poll(self) -> int | None:
        # multiprocessing would also take the end of the fork server for the end of this process
        return self._code() if self._handle.has_ended() else None

    def kill(self) -> None:
        self._handle.send(signal.SIGKILL)

    def wait(self) -> int:
        self._handle.wait()
        self._handle.close()
        return self._code()

    def _code(self) -> int:
        self._process.join(REPORT_SECONDS)
        code: int | None = self._process.exitcode
        return UNKNOWN_CODE if code is None else code


class _Passed(tuple[int, ...]):
    """File descriptors that are passed to a process that starts."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, tuple(DupFd(number) for number in self)


def _detached(*duplicates: Any) -> list[int]:
    return [duplicate.detach() for duplicate in duplicates]


def _run(module: str, passed: Sequence[int], numbers: Sequence[int], environment: Mapping[str, str]) -> None:
    """The entry point of a forked process.

    passed: its descriptors: stdin, stdout, stderr, then others. numbers: those that its parent has for these.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    for standard, number in enumerate(passed[:3]):
        os.dup2(number, standard)
        os.close(number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    _received.update(zip(numbers, passed[3:], strict=True))
    os.environ.clear()
    os.environ.update(environment)
    importlib.import_module(module).main()
