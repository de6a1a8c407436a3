"""A replica resumed with a peer's part of a checkpoint goes on as one that joins a living run does."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, cast

import pytest
import torch

from laws.problems import same
from murmurate.fabric.interface import Capability
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.recipes import recipe
from murmurate.strategies import strategies
from murmurate.strategies.dpsgd import DPSGD
from murmurate.training import checkpoint
from murmurate.training.loop import TrainingLoop
from murmurate.training.rejoin import StateTransfer
from murmurate.training.run import Run
from murmurate.training.worker import member_of
from murmurate.training.worker_context import FINAL, Restored, WorkerContext, staging
from short_runs import altered

STRATEGIES = {name: kind() for name, kind in strategies().items() if name != "solo"}
STRATEGIES |= {"dpsgd, nodes of one": DPSGD(threads=1, local_updates=2)}
WITHOUT_PART = 1


class Transfer:
    """What hands a peer's state to a joiner, without a launcher."""

    def __init__(self, learning: TrainingLoop, transferred: dict[str, Any]) -> None:
        self.learning, self.transferred = learning, {**transferred, "answered": 0}

    def receive(self) -> dict[str, Any]:
        return self.transferred

    def complete(self, transferred: dict[str, Any]) -> None:
        self.learning.replicator.rejoined()


def together(run: Run, folder: Any, act: Any) -> list[Any]:
    """What ``act(run, context)`` gives for every member, on a simulated fabric."""
    torch.set_num_threads(1)
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    run_state = RunState(run.members)
    run_state.open()

    def role(fabric: Any) -> Any:
        return act(run, WorkerContext(fabric.rank, fabric, run_state, folder, time.monotonic()))

    return SimulatedFabric(run.members, seed=0, keep_log=False).run([role] * run.members)


def learn(run: Run, context: WorkerContext) -> None:
    """The one that is to be given a peer's part has made fewer updates, where nobody counts them together."""
    if context.rank == WITHOUT_PART and not run.strategy.synchronous:
        run = dataclasses.replace(run, updates=3)
    member_of(run, context).run_to_end()


def memory(learning: Any) -> tuple[Any, ...]:
    (bound,) = learning.replicator.bound_replicas.values()
    state = learning.replicator.state()
    for one in state.values():
        one["strategy"].pop("marks", None)  # after a resume the master answers a node before it asks
    of = learning.replicator
    counts = bound.staleness_max, of.refused, of.bytes_exchanged // 1_000_000, int(of.waiting_seconds)
    kept = state, bound.replica.steps_taken(), counts
    if isinstance(learning, TrainingLoop):
        learning.source.close()
    return kept


@pytest.fixture(params=STRATEGIES)
def saved(request: Any, tmp_path: Any) -> tuple[Run, Any, dict[int, dict[str, Any]]]:
    """A run, its folder, and the parts of its checkpoint."""
    run = altered(
        recipe("cartpole-gala"),
        strategy=STRATEGIES[request.param],
        replicas=2,
        simulators=1,
        env_steps=None,
        updates=6,
        stop_at_return=None,
    )
    together(run, tmp_path, learn)
    return (
        run,
        tmp_path,
        {r: checkpoint.read_part(staging(tmp_path, FINAL), r) for r in (0, 1, 2)[: run.members]},
    )


def test_with_a_peers_part_it_goes_on_as_a_joiner_does(saved: Any) -> None:
    run, folder, parts = saved

    def resumed(run: Run, context: WorkerContext) -> Any:
        own = context.rank != WITHOUT_PART
        context.restored = Restored(parts[context.rank if own else 0], 0, own)
        return memory(member_of(run, context))

    def joined(run: Run, context: WorkerContext) -> Any:
        if context.rank != WITHOUT_PART:
            return resumed(run, context)
        learning = TrainingLoop(run, context)
        for _ in range(2):
            learning._meet_at_barrier()
        learning._join(cast(StateTransfer, Transfer(learning, parts[0])))
        return memory(learning)

    one, other = together(run, folder, resumed)[WITHOUT_PART], together(run, folder, joined)[WITHOUT_PART]
    assert same(one, other)
    # where all share one memory its count goes on, and elsewhere the peer's
    shares = Capability.SHARED_MEMORY in run.strategy.needs
    assert one[0]["a2c"]["replica"]["clock"] == parts[WITHOUT_PART if shares else 0]["updates"]


def test_each_count_goes_on_once(saved: Any) -> None:
    """What a member counted is restored with its own part, a centre's too, and never with a peer's."""
    run, folder, parts = saved
    for saved_part in parts.values():
        saved_part.update(bytes_exchanged=7_000_000, waiting_seconds=5.0, refused=8)
        saved_part["staleness_max"] = dict.fromkeys(saved_part["staleness_max"], 9)
        strategy = saved_part["replicas"]["a2c"]["strategy"]
        strategy.update({"refused": 3} if "refused" in strategy else {})

    def restored(run: Run, context: WorkerContext) -> Any:
        own = context.rank != WITHOUT_PART
        context.restored = Restored(parts[context.rank if own else 0], 0, own)
        return memory(member_of(run, context))[2]

    for rank, counts in enumerate(together(run, folder, restored)):
        assert counts == ((0, 0, 0, 0) if rank == WITHOUT_PART else (9, 8, 7, 5))
