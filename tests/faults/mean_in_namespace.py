"""One member of a group in a namespace of its own: some means, then what its device has carried.

    python mean_in_namespace.py NAMESPACE ADDRESS RANK SIZE FOLDER COUNT ROUNDS PLAIN

writes FOLDER/<rank>.json: [bytes received, bytes sent] in the rounds, and the first number of the last mean.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from faults.namespaces import enter
from murmurate.fabric.network.fabric import NetworkFabric


def carried():
    """(received, sent) bytes of the device "eth"."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth":
            fields = figures.split()
            return int(fields[0]), int(fields[8])
    raise RuntimeError("there is no device eth here")


def main(namespace, address, rank, size, folder, count, rounds, plain):
    torch.set_num_threads(1)
    enter(namespace)
    store = dist.FileStore(str(folder / "rendezvous"), size)
    fabric = NetworkFabric(
        rank,
        size,
        store,
        run_id="means",
        secret=b"s",
        address=address,
        deadline_seconds=120.0,
        encrypt=not plain,
        shared_memory=False,  # through the one kernel that there is in truth
    )
    channel = fabric.channel("model", torch.zeros(count))
    channel.mean_(torch.zeros(count))
    before = carried()
    for turn in range(rounds):
        x = torch.full((count,), float(rank + turn))
        assert channel.mean_(x) == size
    after = carried()
    state = channel._collectives._state
    outcome = [after[0] - before[0], after[1] - before[1], float(x[0]), state.repeat_asked]
    (folder / f"{rank}.json").write_text(json.dumps(outcome))
    fabric.close()


if __name__ == "__main__":
    name, where, mine, members, place, numbers, turns, clear = sys.argv[1:]
    main(name, where, int(mine), int(members), Path(place), int(numbers), int(turns), clear == "plain")
