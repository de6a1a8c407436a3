"""How the launcher learns of a worker's end."""

from __future__ import annotations

import os
import struct
import subprocess
from multiprocessing import Pipe
from types import SimpleNamespace

from murmurate.fabric.processes.spawn import DIED, WorkerProcess


def test_a_worker_that_dies_while_it_reports_is_dead() -> None:
    """Its pipe holds the length of a message, and only a part of the message."""
    with subprocess.Popen(["sleep", "600"]) as process:
        reads, writes = Pipe(duplex=False)
        stub = SimpleNamespace(pid=process.pid, exitcode=-9, join=lambda seconds: process.wait(seconds))
        worker = WorkerProcess(0, stub, reads)  # type: ignore[arg-type]
        assert not worker.poll()
        os.write(writes.fileno(), struct.pack("!i", 1000) + b"a part")
        writes.close()
        assert worker.poll()
        assert worker.exit is not None
        assert (worker.exit.how, worker.exit.error) == (DIED, "SIGKILL")
        worker.close()
