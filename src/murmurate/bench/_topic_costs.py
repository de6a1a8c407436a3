"""The costs of DPSVI on this machine: a mini-batch, and a push and its answer at the master."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from murmurate.bench import _roles
from murmurate.bench._result import Log
from murmurate.bench._simulated import step_seconds
from murmurate.errors import RunFailed
from murmurate.fabric.interface import Channel, Fabric, Message
from murmurate.replica.vector import Replica
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.dpsgd.sparse_node import SparseNode
from murmurate.training.members import build_learner, open_only_source
from murmurate.training.run import Run

_DEADLINE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class DPSVICosts:
    """Costs on one core of this machine.

    step_seconds: CPU seconds of a mini-batch. step_spread: standard deviation of the logarithm of these
    seconds. svi_step_seconds: CPU seconds of a mini-batch of SVI, which is larger. message_seconds,
    byte_seconds: the master's CPU seconds for a message, and for each byte of it. pushes: for each number of
    local updates, the bytes of a push and its answer, and the CPU seconds measured for them.
    """

    step_seconds: float
    step_spread: float
    svi_step_seconds: float
    message_seconds: float
    byte_seconds: float
    pushes: dict[str, dict[str, float]]


def costs(serial: Run, svi: Run, pushing: dict[int, Run], updates: int, pushes: int, log: Log) -> DPSVICosts:
    """Measure the costs. serial, svi: runs whose mini-batches are timed. pushing: for each number of local
    updates, a run of one worker and a master. updates, pushes: how many are timed; at least 2 updates."""
    log("a mini-batch")
    seconds = step_seconds(serial, updates, time.process_time)
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    svi_seconds = statistics.median(step_seconds(svi, max(updates // 8, 5), time.process_time))
    measured = {}
    for local_updates, run in pushing.items():
        log(f"a push of {local_updates} mini-batches")
        measured[str(local_updates)] = push_cost(run, pushes)
    message, byte = fitted([(push["bytes"], push["master_cpu_seconds"]) for push in measured.values()])
    # the quartiles of a normal distribution are 1.349 standard deviations apart
    return DPSVICosts(middle, math.log(high / low) / 1.349, svi_seconds, message, byte, measured)


def fitted(measured: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds per message, seconds per byte), neither negative, by least squares.

    measured: (bytes, seconds) of pairs of messages, each a push and its answer.
    """
    size, seconds = np.array(measured, dtype=np.float64).T
    slope, intercept = (
        np.linalg.lstsq(np.stack([size, np.ones_like(size)], 1), seconds, rcond=None)[0]
        if np.ptp(size) > 0
        else (0.0, seconds.mean())
    )
    if slope < 0:
        slope, intercept = 0.0, seconds.mean()
    if intercept < 0:
        slope, intercept = size @ seconds / (size @ size), 0.0
    return float(intercept) / 2, float(slope)


class _WaitMeter:
    """A channel whose ``waited`` is the CPU seconds spent on polling for messages that had not arrived."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self.waited = channel, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def wait(self, tag: str, deadline_seconds: float) -> Message | None:
        end, start = time.monotonic() + deadline_seconds, time.process_time()
        while True:
            poll_start = time.process_time()
            message = self._channel.receive(tag)
            if message is not None or time.monotonic() >= end:
                self.waited += poll_start - start
                return message


def push_cost(run: Run, pushes: int) -> dict[str, float]:
    """Bytes of a push and its answer, and the master's CPU seconds for them without waiting.

    Medians over ``pushes``, on two real processes that share memory.
    """
    _, (sizes, seconds) = _roles.run_together(2, _exchange, run, pushes)
    return {"bytes": statistics.median(sizes), "master_cpu_seconds": statistics.median(seconds)}


def _exchange(fabric: Fabric, run: Run, pushes: int) -> tuple[list[int], list[float]]:
    """At the master, bytes and CPU seconds of each push and its answer; at the worker, nothing."""
    replicator = Replicator(run.strategy, fabric)
    learner = build_learner(run, fabric.rank, replicator.replicate)
    (bound,) = replicator.bound_replicas.values()
    if fabric.rank == 0:
        for batch in open_only_source(run, learner):
            learner.learn(batch)
            if bound.last.round > pushes:
                return [], []
    sizes: list[int] = []
    seconds: list[float] = []
    end = time.monotonic() + _DEADLINE_SECONDS
    with torch.no_grad():
        while len(sizes) <= pushes:
            bytes_before, cpu_start = bound.channel.traffic.bytes, time.process_time()
            channel = _WaitMeter(bound.channel)
            if bound.strategy.serve(bound.replica, cast(Channel, channel)):
                seconds.append(time.process_time() - cpu_start - channel.waited)
                sizes.append(bound.channel.traffic.bytes - bytes_before)
            elif time.monotonic() > end:
                raise RunFailed(f"the worker did not push {pushes} times within {_DEADLINE_SECONDS:g} s")
    return sizes[1:], seconds[1:]


def push_bytes(run: Run, local_updates: Sequence[int]) -> dict[str, Any]:
    """By number of local updates, the rows and bytes of a worker's first push, and the bytes of the whole
    vector."""
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for B in local_updates:
        learner = build_learner(run, 0, Replica)
        replica = learner.replica
        node = SparseNode(replica, [0], 0)
        source = open_only_source(run, learner)
        for batch in itertools.islice(source, B):
            learner.learn(batch)
        source.close()
        delta = node.next_push(0)
        rows[str(B)] = {
            "rows": len(delta.row),
            "sparse_bytes": delta.pack().nbytes,
            "dense_bytes": replica.params.nbytes,
        }
    return rows
