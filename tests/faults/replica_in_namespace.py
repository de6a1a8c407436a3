"""One replica of the namespaces test, as a process of its own: gossip on a problem, and deltas for all.

    python replica_in_namespace.py NAMESPACE ADDRESS RANK SIZE FOLDER

It runs until FOLDER/stop exists, then waits for all deltas, mixes on without gradients and writes
FOLDER/<rank>.json. What it has done so far is in FOLDER/<rank>.progress.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from faults.namespaces import ADDRESSES, enter
from murmurate.fabric.network.fabric import NetworkFabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.pull_gossip import PullGossip

PARAMETERS = 2000
_PATIENCE_SECONDS = 60.0


class Point(nn.Module):
    """Least squares: the distance to a target, another one for each replica."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PARAMETERS))


def open_fabric(namespace, address, rank, size, folder):
    torch.set_num_threads(1)
    enter(namespace)
    store = dist.FileStore(str(folder / "rendezvous"), size)
    return NetworkFabric(
        rank,
        size,
        store,
        run_id="namespaces",
        secret=b"s",
        address=address,
        silence_seconds=2.0,
        # there is one kernel in truth, through whose memory the two hosts would see each other
        shared_memory=address == ADDRESSES[0],
    )


def main(namespace, address, rank, size, folder):
    fabric = open_fabric(namespace, address, rank, size, folder)
    deltas = fabric.channel("deltas", torch.zeros(PARAMETERS))
    module = Point()
    replicator = Replicator(PullGossip(seed=1), fabric)
    replica = replicator.replicate("model", module, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    models = replicator.bound_replicas["model"].channel
    others = [other for other in range(size) if other != rank]
    total = torch.zeros(PARAMETERS)
    sent, heard, order, living = 0, dict.fromkeys(others, 0), True, set()
    progress = folder / f"{rank}.progress"

    def take(deadline_seconds):
        nonlocal order, total
        message = deltas.wait("delta", deadline_seconds)
        if message is not None:
            heard[message.sender] += 1
            order = order and message.note == heard[message.sender]
            total += message.x
        return message is not None

    pending = dict.fromkeys(others, 0)  # deltas each peer has not been sent yet, as its queue was full
    while not (folder / "stop").exists():
        replica.descend((module.weight - rank).square().sum() / 2)
        sent += 1
        own = torch.full((PARAMETERS,), float(rank + 1))
        total += own
        for other in others:
            pending[other] += 1
            while pending[other] and deltas.send(
                other, "delta", own, note=sent - pending[other] + 1, deadline_seconds=0.0
            ):
                pending[other] -= 1
        while take(0.0):
            pass
        living.add(tuple(fabric.living()))
        progress.write_text(json.dumps([sent, list(fabric.living()), sum(heard.values())]))
        time.sleep(0.05)
    end = time.monotonic() + _PATIENCE_SECONDS
    for other in others:
        while pending[other] and time.monotonic() < end:
            pending[other] -= deltas.send(
                other, "delta", own, note=sent - pending[other] + 1, deadline_seconds=0.1
            )
            while take(0.0):
                pass
        deltas.send(other, "end", own, note=sent)
    expected = {}
    while (len(expected) < len(others) or expected != heard) and time.monotonic() < end:
        message = deltas.receive("end")
        if message is not None:
            expected[message.sender] = int(message.note)
        take(0.05)
    apart = _mix(replica, models, deltas)
    outcome = {
        "total": total.unique().tolist(),
        "sent": sent,
        "heard": heard,
        "expected": expected,
        "order": order,
        "living": sorted(living),
        "living_at_the_end": list(fabric.living()),
        "apart_before": apart[0],
        "apart_after": apart[1],
        "refused": dict(fabric.refused),
        "connections": {
            connection.peer: connection.times_connected for connection in fabric.endpoint.connections.values()
        },
    }
    (folder / f"{rank}.json").write_text(json.dumps(outcome))
    fabric.close()


def _mix(replica, models, deltas):
    """How far apart all are before and after 60 rounds of gossip without gradients."""
    others = [rank for rank in range(deltas.size) if rank != deltas.rank]
    apart = []
    for rounds in (0, 60):
        begun = [models.version(other) for other in others]
        for number in range(rounds):
            replica.follow(torch.zeros(PARAMETERS))
            # mixing is what is tested here: each round waits for the vectors of the round before
            models.wait_newer(others, [first + number for first in begun], 1.0)
        vectors = torch.stack(list(deltas.gather(replica.params).values()))
        if len(vectors) != deltas.size:
            raise RuntimeError("somebody is missing at the end")
        apart.append(float((vectors - vectors.mean(0)).abs().max()))
    return apart


if __name__ == "__main__":
    name, where, mine, count, place = sys.argv[1:]
    main(name, where, int(mine), int(count), Path(place))
