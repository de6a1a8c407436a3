"""Times calls of a replay on request: one JSON request per line of stdin, one JSON answer per line of stdout.

The first line of stdout is ``{"peer", "version"}``. The answer to a request ``{"task", "capacity", "batch",
"calls", "cold"}`` is ``{"seconds"}``, the median of a call, or ``{"missing"}``, why there is none, or
``{"failed"}``, what was raised. The request ``{"forget": true}`` drops the replay; its answer is ``{}``. The
tasks:

    sample          indices and importance weights (beta 0.4) of ``batch`` prioritized draws, in new arrays
    sample_reused   the same, into preallocated outputs, where the library supports them
    update          new priorities for ``batch`` indices from their errors: |error| + eps, power alpha 0.6
    find            the tree alone: the indices of ``batch`` masses (sums of the priorities up to an index)
    rows            a prioritized batch of transitions with s of 17 and a of 6 float32, all fields
    atari           a prioritized batch of transitions with s and s' of 4 x 84 x 84 uint8, all fields
    insert          ``batch`` transitions as in ``rows``, with the priority of new items

Our own server (``_replay_server``) also has ``find_reused``, ``rows_reused`` and ``atari_reused`` (into
preallocated outputs), and ``bound``.

Before its first call a task's replay is full: ``capacity`` items with priorities (U + 0.001) ** 0.6, U
uniform in [0, 1) (see ``priorities``). Each call has other indices than the one before.

hot: blocks of calls back to back. cold: 96 MiB of other memory are written between two calls, much as the
network's step between two batches does.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ALPHA, BETA = 0.6, 0.4
TRANSITION = (17, 6)  # numbers in s and in a
FRAMES = (4, 84, 84)
_BLOCK_SECONDS = 0.002
_LEAST_BLOCKS = 5
_WINDOW_SECONDS = 0.4
_COLD_BYTES = 96 * 2**20

Call = Callable[[], Any]


def priorities(capacity: int) -> np.ndarray:
    """[capacity] float32, the same for all libraries, before the power alpha."""
    return (np.random.default_rng(0).random(capacity) + 0.001).astype(np.float32)


def rounds(capacity: int, batch: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Indices [R, batch] int64 and errors [R, batch] float32 of R updates."""
    count = max(1, min(2**20, 4 * capacity) // batch)
    generator = np.random.default_rng(seed)
    return (
        generator.integers(0, capacity, (count, batch)),
        (generator.random((count, batch)) + 0.001).astype(np.float32),
    )


def serve(name: str, version: str, make: Callable[[str, int, int], Call | None]) -> None:
    """Answer until stdin ends. ``make(task, capacity, batch)`` returns the call to be timed, or None."""
    print(json.dumps({"peer": name, "version": version}), flush=True)
    other_memory = np.zeros(0, dtype=np.uint8)
    calls: dict[tuple[str, int, int], Call | None] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("forget"):
            calls.clear()
            print(json.dumps({}), flush=True)
            continue
        key = (request["task"], request["capacity"], request["batch"])
        try:
            if key not in calls:
                calls.clear()
                calls[key] = make(*key)
            call = calls[key]
            if call is None:
                answer: dict[str, Any] = {"missing": f"{name} has no {key[0]}"}
            elif request.get("cold"):
                if not len(other_memory):
                    other_memory = np.zeros(_COLD_BYTES, dtype=np.uint8)
                answer = {"seconds": _cold(call, request["calls"], other_memory)}
            else:
                answer = {"seconds": _hot(call, request["calls"])}
        except Exception as problem:  # reported, so that the benchmark goes on without it
            answer = {"failed": f"{name}: {type(problem).__name__}: {problem}"}
        print(json.dumps(answer), flush=True)


def _hot(call: Call, calls: int) -> float:
    """Median seconds of a call, over blocks of calls back to back; slow calls have shorter blocks."""
    began = time.perf_counter()
    for _ in range(3):
        call()
    call_seconds = (time.perf_counter() - began) / 3
    block = max(1, min(calls, int(_BLOCK_SECONDS / max(call_seconds, 1e-7))))
    for _ in range(block):
        call()
    blocks: list[float] = []
    deadline = time.perf_counter() + _WINDOW_SECONDS
    while len(blocks) < _LEAST_BLOCKS or (len(blocks) < calls // block and time.perf_counter() < deadline):
        began = time.perf_counter()
        for _ in range(block):
            call()
        blocks.append((time.perf_counter() - began) / block)
    return statistics.median(blocks)


def _cold(call: Call, calls: int, other: np.ndarray) -> float:
    """Median seconds of a call after ``other`` memory has been written."""
    times = []
    for _ in range(calls):
        other += 1
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
