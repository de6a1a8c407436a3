"""One member of DPSGD over a bad connection, as a process: nodes of one learner, and the master last.

    python dpsgd_in_namespace.py NAMESPACE ADDRESS RANK SIZE FOLDER

Learners run until FOLDER/stop exists, then drain; all write FOLDER/<rank>.json. What a learner has done so
far is in FOLDER/<rank>.progress: [updates, the living, answers it had].
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from faults.replica_in_namespace import PARAMETERS, Point, open_fabric
from murmurate.replicator.replicator import Replicator
from murmurate.strategies.dpsgd import DPSGD

_DRAIN_SECONDS = 60.0


def main(namespace, address, rank, size, folder):
    fabric = open_fabric(namespace, address, rank, size, folder)
    replicator = Replicator(DPSGD(threads=1, local_updates=5), fabric)
    module = Point().double()
    replica = replicator.replicate("model", module, lambda given: torch.optim.SGD(given, lr=0.05))
    bound = replicator.bound_replicas["model"]
    end = fabric.channel("end", torch.zeros(1))
    work = serve if rank == size - 1 else learn
    outcome = work(replicator, bound, module, end, folder)
    replicator.publish()
    end.gather(torch.zeros(1))  # now everybody can read what the master shows
    shown = bound.strategy.consensus(replica, bound.channel)
    outcome |= {"shown": shown.unique().tolist(), "refused": dict(fabric.refused), "clock": replica.clock}
    (folder / f"{rank}.json").write_text(json.dumps(outcome))
    fabric.close()


def serve(replicator, bound, module, end, folder):
    done = 0
    while done < end.size - 1:
        with torch.no_grad():
            bound.strategy.serve(bound.replica, bound.channel)
        done += end.receive("done") is not None
    drained = replicator.drain(1, _DRAIN_SECONDS)
    return {"drained": drained, "v": bound.replica.params.unique().tolist()}


def learn(replicator, bound, module, end, folder):
    rank, replica = end.rank, bound.replica
    pushed, count = torch.zeros(PARAMETERS, dtype=torch.float64), 0
    send = bound.channel.send

    def counted(to, tag, x, note=0.0, deadline_seconds=None):
        nonlocal count
        sent = send(to, tag, x, note, deadline_seconds)
        if sent and tag == "update" and note >= 0:
            pushed.add_(x)
            count += 1
        return sent

    bound.channel.send = counted
    while not (folder / "stop").exists():
        exchange = replica.descend((module.weight - rank).square().sum() / 2)
        progress = json.dumps([replica.clock, list(bound.channel.living()), exchange.round])
        (folder / f"{rank}.progress.new").write_text(progress)
        (folder / f"{rank}.progress.new").rename(folder / f"{rank}.progress")
        time.sleep(0.02)
    drained = replicator.drain(1, _DRAIN_SECONDS)
    end.send(end.size - 1, "done", torch.zeros(1))
    return {"drained": drained, "pushed": pushed.unique().tolist(), "pushes": count}


if __name__ == "__main__":
    name, where, mine, total, place = sys.argv[1:]
    main(name, where, int(mine), int(total), Path(place))
