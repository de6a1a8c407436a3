"""A corpus of NYTimes's size from a file to topics, by the command that a user types."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from murmurate.bench._result import Log
from murmurate.datasets.generated import generate
from murmurate.datasets.writing import write
from murmurate.errors import RunFailed
from murmurate.ranges import PositiveFloat, PositiveInt

NAME = "topics-stream"
SUMMARY = "a corpus of NYTimes's size from a file to topics in bounded memory, on real processes"

_POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class StreamPlan:
    """The defaults are the sizes of NYTimes in the UCI repository.

    documents: number of documents of the generated corpus. vocabulary: number of words of its vocabulary.
    mean_length: mean number of words of a document. topics: number of topics K. replicas: number of processes
    that share one lambda.
    """

    documents: PositiveInt = 300_000
    vocabulary: PositiveInt = 102_660
    mean_length: PositiveFloat = 330
    topics: PositiveInt = 50
    replicas: PositiveInt = 2


QUICK = FULL = StreamPlan()


def measure(plan: StreamPlan, log: Log) -> dict[str, Any]:
    """One pass of ``murmurate topics fit`` under Hogwild: seconds, perplexity, peaks of memory."""
    with tempfile.TemporaryDirectory(prefix="topics-stream-") as folder:
        corpus = Path(folder, "docword.generated.txt")
        entries = _write(plan, corpus, log)
        size = corpus.stat().st_size
        log(f"streaming {size / 2**20:,.0f} MiB of UCI text")
        run = Path(folder, "run")
        command = [sys.executable, "-m", "murmurate", "topics", "fit", str(corpus), "--out", str(run)]
        command += ["--topics", str(plan.topics), "--replicas", str(plan.replicas), "--passes", "1"]
        began = time.monotonic()
        peaks = _memory_peaks(command, Path(folder, "output"))
        wall = time.monotonic() - began
        summary = json.loads((run / "summary.json").read_text())
    return {
        "entries": entries,
        "corpus_bytes": size,
        "wall_seconds": wall,
        "training_seconds": summary["wall_seconds"],
        "documents": summary["env_steps"],
        "perplexity": summary["perplexity"],
        "peak_resident_bytes": {name: peaks[name] for name in sorted(peaks)},
        "peak_resident_bytes_most": max(peaks.values()),
    }


def _write(plan: StreamPlan, path: Path, log: Log) -> int:
    """Write a generated corpus to ``path``; returns its number of entries."""
    log(f"drawing {plan.documents:,} documents")
    corpus = generate(plan.documents, plan.vocabulary, plan.topics, plan.mean_length, seed=0).corpus
    write(corpus, path, "uci")
    return len(corpus.words)


def _memory_peaks(command: list[str], output: Path) -> dict[str, int]:
    """Run a command; returns the peak resident bytes of each process of its tree, mapped files included."""
    peaks: dict[str, int] = {}
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        while process.poll() is None:
            for pid in _tree(process.pid):
                if (peak := _peak(pid)) is not None:
                    name = "command" if pid == process.pid else f"process {pid}"
                    peaks[name] = max(peaks.get(name, 0), peak)
            time.sleep(_POLL_SECONDS)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RunFailed(f"{' '.join(command)} failed: {output.read_text(errors='replace')[-600:]}")
    return peaks


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _peak(pid: int) -> int | None:
    """The kernel's own high-water mark, so that no peak between two polls is missed."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
