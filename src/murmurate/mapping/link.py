"""Measures the link between two hosts: latency and bandwidth of a message of the fabric between hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from murmurate.errors import Refusal
from murmurate.fabric.interface import Fabric, FabricError
from murmurate.launch.script import run
from murmurate.launch.script_ranks import torchrun_environment
from murmurate.mapping.lines import fit
from murmurate.mapping.profile import NETWORK, DeviceProfile, Link, load
from murmurate.native.cores import usable_cores
from murmurate.replicator.user_loop import OwnLoop

_MESSAGES = ((1, 200), (25_000, 50), (1_000_000, 5))  # numbers of 4 bytes, and messages in a window
_WINDOWS = 6
_DEADLINE_SECONDS = 60.0
_LEAST_SECONDS_PER_BYTE = 1e-15  # of a fit in which the size makes no difference


def measure() -> Link | None:
    """The link between the two hosts on each of which torchrun started a rank, at rank 0; None at rank 1.

    The messages are encrypted, as those of a run are. Raises Refusal in a process without a rank, and for
    other ranks; RunFailed if a rank fails.
    """
    environment = torchrun_environment()
    if environment is None or (environment.size, environment.hosts) != (2, 2):
        raise Refusal(
            "--link measures between two hosts. Give this on both, where HOST is the first one's name: "
            "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
            "-m murmurate plan RECIPE --link"
        )
    samples, _ = run(_measured, launcher="torchrun")
    return link(samples) if environment.rank == 0 else None


def _measured(replicator: OwnLoop) -> list[tuple[int, float]]:
    replicator.broadcast(torch.zeros(1))  # when both have begun
    return messages(replicator.fabric)


def messages(fabric: Fabric, clock: Callable[[], float] = time.perf_counter) -> list[tuple[int, float]]:
    """(bytes, seconds of a message) in each window, to be called by both members of ``fabric``: half the time
    of a message and of the answer to it. Raises FabricError if the other member does not answer."""
    largest, _ = _MESSAGES[-1]
    channel = fabric.channel("link", torch.zeros(largest))
    samples = []
    for count, calls in _MESSAGES:
        x = torch.zeros(count)
        for window in range(1 + _WINDOWS):
            began = clock()
            for turn in range(2 * calls):
                if turn % 2 == fabric.rank:
                    channel.send(1 - fabric.rank, "link", x, deadline_seconds=_DEADLINE_SECONDS)
                elif channel.wait("link", _DEADLINE_SECONDS) is None:
                    raise FabricError(
                        f"rank {1 - fabric.rank} sent nothing for {_DEADLINE_SECONDS:g} s: look at its output"
                    )
            if window:  # the first warms up
                samples.append((x.nbytes, (clock() - began) / (2 * calls)))
    return samples


def link(samples: list[tuple[int, float]]) -> Link:
    """The latency and bandwidth that fit samples (bytes, seconds of a message) best."""
    line = fit(samples)
    return Link(line.a, 1 / max(line.b, _LEAST_SECONDS_PER_BYTE))


def profile_with(link: Link, path: Path) -> DeviceProfile:
    """The profile in ``path``, or a new one, with this network. Raises Refusal as ``load`` does."""
    profile = load(path) if path.exists() else DeviceProfile.here(usable_cores(), "cpu")
    profile.links[NETWORK] = link
    return profile
