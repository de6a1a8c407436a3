"""From a Run to a finished run folder, and from a run folder on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from murmurate import checkpoint
from murmurate.coordinator import Coordinator
from murmurate.errors import MissingExtra, Refusal
from murmurate.fabric.arena import refuse_if_small
from murmurate.fabric.interface import Capability
from murmurate.folder import claim, read_run, write_run
from murmurate.launch import launcher
from murmurate.play import film, write_strip
from murmurate.recipes import recipe
from murmurate.record.reader import truncate_after
from murmurate.replicator import check_capabilities
from murmurate.summary import summarize
from murmurate.train import Run
from murmurate.vector import Replica

FINISHED, FAILED, REFUSED = 0, 1, 2


@dataclasses.dataclass
class Finish:
    """How a run ended: the exit code of the command line, and ``summary.json``."""

    code: int
    summary: dict[str, Any]


def train(run: Run, folder: Path) -> Finish:
    """Check everything that can be checked, then run. Raises Refusal with nothing changed."""
    preflight(run)
    claim(folder)
    write_run(folder, run)
    return _carry_out(run, folder, lambda start: start(run, folder))


def resume(folder: Path, changes: Callable[[Run], Run] = lambda run: run) -> Finish:
    """Go on from a run folder's newest whole checkpoint; ``changes`` may move the run's end.

    Raises Refusal if there is nothing to go on from.
    """
    run = changes(read_run(folder, recipe))
    preflight(run)
    found = checkpoint.newest(folder / "checkpoints")
    manifest = checkpoint.read_manifest(found)
    saved = checkpoint.parts(found)
    if run.replicas != int(manifest["replicas"]):
        raise Refusal(f"{folder} was made with {manifest['replicas']} replicas; resume with the same number.")
    # a replica that had died goes on from a living one's state
    parts = {rank: rank if rank in saved else saved[rank % len(saved)] for rank in range(run.replicas)}
    truncate_after(folder / "metrics.jsonl", time_seconds=float(manifest["seconds"]))
    return _carry_out(
        run,
        folder,
        lambda start: start(
            run,
            folder,
            offset_seconds=float(manifest["seconds"]),
            manifest=manifest,
            checkpoint=found,
            parts=parts,
        ),
    )


def preflight(run: Run) -> None:
    """Raise Refusal for whatever can be known to fail before anything is changed."""
    run.validate()
    offered: frozenset[Capability] = launcher(run.launcher).CAPABILITIES
    devices = {run.placement.device(rank).type for rank in range(run.replicas)}
    if "cuda" in devices and not torch.cuda.is_available():
        raise Refusal("the placement names a GPU and torch sees none. Use --placement.devices cpu.")
    where = f"the {run.launcher} launcher"
    if devices != {"cpu"}:
        offered -= {Capability.SHARED_MEMORY}
        where += " on a GPU"
    check_capabilities(run.strategy, offered, where)
    if run.strategy.name == "solo" and run.replicas > 1:
        raise Refusal(
            f"solo trains one replica and {run.replicas} were asked for. "
            "Use --replicas 1, or let them agree: --strategy all-reduce."
        )
    simulators = run.world.open(1, training=True)
    spec = simulators.spec
    simulators.close()
    agent = run.agent.build(spec, Replica, seed=run.seed, device=torch.device("cpu"))
    vector_bytes = 4 * sum(len(replica) for replica in agent.replicas.values())
    # per replica: its process, optimizer state, and at most three slots in each of two registers
    needed = run.replicas * (150 * 2**20 + 16 * vector_bytes)
    refuse_if_small(needed, f"{run.recipe} with {run.replicas} replica(s)")


def _carry_out(run: Run, folder: Path, begin: Callable[[Any], Coordinator]) -> Finish:
    coordinator = begin(launcher(run.launcher).start)
    code, reason = FINISHED, "finished"
    if coordinator.interrupted:
        code, reason = 128 + coordinator.signal, "interrupted"
    elif coordinator.failure is not None:
        code, reason = FAILED, f"failed: {coordinator.failure}"
    try:
        return Finish(code, summarize(run, folder, coordinator, reason))
    except OSError as error:
        raise checkpoint.disk_failure(folder, error) from error


def picture(folder: Path) -> None:
    """A strip of pictures of one game for the report, where the world can be drawn here."""
    where = folder / "checkpoints" / "last"
    if checkpoint.damage(where) is None:
        with contextlib.suppress(MissingExtra):
            write_strip(film(read_run(folder, recipe), where), folder / "videos" / "frames.png")
