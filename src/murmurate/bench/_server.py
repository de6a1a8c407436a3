"""Runs each library in its own process, pinned to one core, behind a JSON-lines request/response protocol."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmurate.bench import _peers
from murmurate.bench._result import Log
from murmurate.errors import RunFailed

_PEER_PROTOCOLS = Path(__file__).with_name("_peer_protocols")


@dataclass
class Server:
    """A process that answers requests, and the version of the library behind it. command: for messages, the
    command line that starts the process."""

    process: subprocess.Popen[str]
    command: str
    version: str = ""

    @classmethod
    def start_module(cls, module: str) -> contextlib.AbstractContextManager[Server]:
        """Run a module of this package."""
        return cls.run([sys.executable, "-m", module])

    @classmethod
    def start_peer(cls, name: str) -> contextlib.AbstractContextManager[Server]:
        """Run ``benchmarks/peers/<name>/run.py`` in its own environment, with only ``_peer_protocols`` of
        this package on its import path."""
        return cls.run(_peers.command(name), module_path=str(_PEER_PROTOCOLS))

    @classmethod
    @contextlib.contextmanager
    def run(
        cls, command: list[str], *, pinned: bool = True, module_path: str | None = None
    ) -> Iterator[Server]:
        """Run a command that first prints its version and then answers requests; killed at the end.

        pinned: whether the process runs on the last core alone, because the first one serves most of the
        machine's interrupts. module_path: its ``PYTHONPATH``; None: that of this process. Raises RunFailed if
        the command ends without printing its version.
        """
        path = os.environ.get("PYTHONPATH", "") if module_path is None else module_path
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        setting = [] if module_path is None else ["env", f"PYTHONPATH={module_path}"]
        server = cls(process, shlex.join([*setting, *command]))
        try:
            if pinned:
                os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
            server.version = str(server._answer().get("version", ""))
            yield server
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # a request that the process did not read
                        pipe.close()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to ``request``. Raises RunFailed if the process ends instead."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended: then there is no answer either
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """The next line that is a JSON object: libraries print other lines, too, even numbers."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
                if isinstance(answer, dict):
                    return answer
        raise RunFailed(f"{self.command} ended unexpectedly. Run it by hand to see why.")


def start_servers(
    stack: contextlib.ExitStack, module: str, peers: Sequence[str], log: Log
) -> tuple[dict[str, Server], list[dict[str, Any]]]:
    """Our own server (``module``) and the servers of the installed peers, by name; and the entries for the
    result's field ``peers``."""
    servers = {"murmurate": stack.enter_context(Server.start_module(module))}
    entries: list[dict[str, Any]] = []
    for name in peers:
        if reason := _peers.absent(name):
            entries.append({"peer": name, "status": reason})
            continue
        log(f"starting {name}")
        servers[name] = stack.enter_context(Server.start_peer(name))
        entries.append({"peer": name, "status": "ran", "version": servers[name].version})
    return servers, entries
