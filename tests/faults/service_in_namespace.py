"""A learner of a replay service in a namespace of its own: what it counts (``bench._service_counts``).

    python service_in_namespace.py NAMESPACE ADDRESS RANK SIZE FOLDER SECONDS

writes FOLDER/<rank>.json.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from faults.namespaces import enter
from murmurate.bench._service_counts import ServicePlan, serve_and_count
from murmurate.fabric.network.fabric import NetworkFabric

PLAN = ServicePlan(actors=4, samplers=2, shards=2, simulators=4, kills=1, kill_draws=50, filled=512, batch=64)


def main(namespace, address, rank, size, folder, seconds):
    torch.set_num_threads(1)
    enter(namespace)
    store = dist.FileStore(str(folder / "rendezvous"), size)
    fabric = NetworkFabric(
        rank, size, store, run_id="service", secret=b"s", address=address, deadline_seconds=120.0
    )
    plan = dataclasses.replace(PLAN, seconds=seconds)
    (folder / f"{rank}.json").write_text(json.dumps(serve_and_count(fabric, plan)))
    fabric.close()


if __name__ == "__main__":
    name, where, mine, members, place, duration = sys.argv[1:]
    main(name, where, int(mine), int(members), Path(place), float(duration))
