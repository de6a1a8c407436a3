"""Libraries in processes of their own that answer one JSON line with another, on one core."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmurate.bench._peers import home
from murmurate.errors import RunFailed

_WINDOWS = Path(__file__).with_name("_windows")


def absent(name: str) -> str | None:
    """Why a peer cannot be asked, None if it can."""
    if _python(name).exists():
        return None
    how = f"benchmarks/peers/{name}/README.md says how, or set MURMURATE_PEERS"
    return f"not installed: it needs its own virtual environment; {how}"


def _python(name: str) -> Path:
    return home() / name / ".venv" / "bin" / "python"


@dataclass
class Server:
    """A library, its version, and the process that answers for it."""

    process: subprocess.Popen[str]
    version: str = ""

    @classmethod
    def own(cls, module: str) -> contextlib.AbstractContextManager[Server]:
        """``module`` of ours, as we find it ourselves."""
        return cls.run([sys.executable, "-m", module])

    @classmethod
    def peer(cls, name: str) -> contextlib.AbstractContextManager[Server]:
        """``benchmarks/peers/<name>/run.py`` in its environment; of ours it sees the protocols alone."""
        return cls.run([str(_python(name)), str(home() / name / "run.py")])

    @classmethod
    @contextlib.contextmanager
    def run(cls, command: list[str]) -> Iterator[Server]:
        """Any command that answers in that way, on the last core."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path(command[0])},
        )
        # the last core: the first one serves most of the machine's interrupts
        os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        server = cls(process)
        try:
            server.version = str(server._answer().get("version", ""))
            yield server
        finally:
            process.kill()
            process.wait()

    def say(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to ``request``. Raises RunFailed if the process ends instead."""
        if self.process.stdin is None:
            raise RuntimeError("pipes were asked for")
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """The next line that is an answer: a library may print what it likes between them."""
        if self.process.stdout is None:
            raise RuntimeError("pipes were asked for")
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RunFailed(f"{' '.join(self.process.args)} ended by itself. Run it by hand to see why.")  # type: ignore[arg-type]


def _path(python: str) -> str:
    """Where modules are found: ours as it finds them itself, a peer only the protocols."""
    return os.environ.get("PYTHONPATH", "") if python == sys.executable else str(_WINDOWS)
