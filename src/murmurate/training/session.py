"""From a Run to a finished run folder, and from a run folder on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from murmurate.agents.interface import Learner
from murmurate.errors import Refusal, RunFailed
from murmurate.evaluation.play import film, write_strip
from murmurate.fabric.interface import Capability, Fabric
from murmurate.fabric.processes.shared_memory import refuse_if_small
from murmurate.fabric.simulated.fabric import Crashed, SimulatedFabric
from murmurate.launch import launcher
from murmurate.launch import offered as capabilities_of
from murmurate.recipes import finished, recipe
from murmurate.record.reader import truncate_after
from murmurate.replay.config import memory_bytes
from murmurate.replay.memory import refuse_full_disk
from murmurate.replicator.replicator import Replicator, check_capabilities
from murmurate.training import checkpoint
from murmurate.training.coordinator import Coordinator, SecondInterrupt, all_is_saved, signals_restored
from murmurate.training.data_record import refuse_another, refuse_missing, write_record
from murmurate.training.restore import learners
from murmurate.training.run import Run
from murmurate.training.run_folder import claim, held, read_run, unclaim, write_run
from murmurate.training.summary import summarize
from murmurate.worlds.interface import ExampleWorld, spec_of

FINISHED, FAILED, REFUSED = 0, 1, 2


@dataclasses.dataclass
class Finish:
    """How a run ended: the exit code of the command line, and ``summary.json``.

    summary: None where another process leads the run, and tells of it. folder: where that is not the one
    that was asked for.
    """

    code: int
    summary: dict[str, Any] | None
    folder: Path | None = None


@signals_restored()
def train(run: Run, folder: Path) -> Finish:
    """Check everything that can be checked, then run. Raises Refusal with nothing changed."""
    run = finished(run)
    preflight(run)
    run = resolved(run)
    crew = _crew(run)
    if crew is None:
        return _begin(run, folder, None)
    if not crew.leads:
        return Finish(launcher(run.launcher).follow(_stored), None)
    with _told(crew):
        begun = crew.begun()  # by ranks that were ended and started again
        if begun is None:
            return _begin(run, folder, crew)
        if any(checkpoint.damage(begun / "checkpoints" / name) is None for name in ("last", "previous")):
            finish = resume(begun, lambda _: run)
        else:
            unclaim(begun, existed=True)
            finish = _begin(run, begun, crew)
        return dataclasses.replace(finish, folder=begun)


def _crew(run: Run) -> Any:
    """This process among ranks that somebody else started; None where the launcher starts the roles."""
    make = getattr(launcher(run.launcher), "crew", None)
    return None if make is None else make()


@contextlib.contextmanager
def _told(crew: Any) -> Iterator[None]:
    """If the leader refuses, nobody waits for it."""
    try:
        yield
    except Refusal:
        crew.refuse()
        raise


def _stored(folder: Path) -> Run:
    return read_run(folder, recipe)


def _begin(run: Run, folder: Path, crew: Any) -> Finish:
    existed = folder.exists()
    claim(folder)
    if crew is not None:
        crew.claimed(folder)
    try:
        with held(folder):
            write_run(folder, run)
            write_record(folder, run.world)
            return _carry_out(run, folder, lambda start: start(run, folder))
    except Refusal as refusal:
        if any((folder / "checkpoints").glob("*/state.json")):  # it had begun: nothing is taken back
            raise RunFailed(f"{refusal} The checkpoints in {folder} are kept.") from refusal
        unclaim(folder, existed)
        raise


def resolved(run: Run) -> Run:
    """``run`` with nothing left to be decided by the machine that it runs on."""
    agent = run.agent.resolved(spec_of(run.world), run.placement.device(0))
    return dataclasses.replace(run, agent=agent)


@signals_restored()
def resume(folder: Path, changes: Callable[[Run], Run] = lambda run: run) -> Finish:
    """Go on from a run folder's newest whole checkpoint; ``changes`` may move the run's end, say.

    Raises Refusal, with nothing changed, if there is nothing to go on from or it belongs to another run.
    """
    stored = read_run(folder, recipe)
    run = changes(stored)
    refuse_missing(run.world)
    preflight(run)
    crew = _crew(run)
    if crew is not None and not crew.leads:
        return Finish(launcher(run.launcher).follow(_stored), None)
    with contextlib.nullcontext() if crew is None else _told(crew):
        found = checkpoint.newest(folder / "checkpoints")
        with held(folder):
            return _go_on(run, stored, folder, found)


# what a resumed run may do otherwise; all else is what was learned so far
_MAY_CHANGE = frozenset(
    {
        "env_steps", "updates", "minutes", "stop_at_return", "launcher", "placement", "eval_episodes",
        "checkpoint_every_env_steps", "probe_every_updates", "record_every_seconds",
        "restarts", "compression",
    }
)  # fmt: skip


def _go_on(run: Run, stored: Run, folder: Path, found: Path) -> Finish:
    refuse_another(folder, run.world, stored.world)
    manifest = checkpoint.read_manifest(found)
    saved = checkpoint.parts(found)
    if run.replicas != int(manifest["replicas"]):
        raise Refusal(f"{folder} was made with {manifest['replicas']} replicas; resume with the same number.")
    # a replica that had died goes on from a living one's state
    learned = [rank for rank in saved if rank < run.replicas]
    parts = {rank: rank if rank in saved else learned[rank % len(learned)] for rank in range(run.replicas)}
    if run.strategy.centre:
        parts[run.replicas] = run.replicas
    _fits(run, found, saved)
    begun, wanted = _without_places(stored), _without_places(run)
    fixed = [
        field.name
        for field in dataclasses.fields(run)
        if field.name not in _MAY_CHANGE and getattr(wanted, field.name) != getattr(begun, field.name)
    ]
    if fixed:
        raise Refusal(
            f"{' and '.join(fixed)} cannot change on resume: what was learned so far depends on it. "
            "Train anew: murmurate train, with --out."
        )
    if run != stored:
        write_run(folder, run)
    write_record(folder, run.world)  # an older version kept none
    if found.name != "last":
        checkpoint.distrust(found.with_name("last"))
    # each replica saved at a moment of its own, and the checkpoint was complete some time after that
    counts = {rank: checkpoint.env_steps(found, rank) for rank in saved}
    clocks = {rank: checkpoint.updates(found, rank) for rank in learned}
    seconds = float(manifest["seconds"])
    truncate_after(folder / "metrics.jsonl", env_steps=counts, updates=clocks, time_seconds=seconds)
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


def _without_places(run: Run) -> Run:
    """Where a replay and a corpus lie may change too (of a corpus ``source.json`` says whether it is the
    same), and whether checkpoints hold the replay: where the newest has none, it begins empty."""
    if run.replay is not None:
        run = dataclasses.replace(run, replay=dataclasses.replace(run.replay, saved=False, folder=None))
    if isinstance(run.world, ExampleWorld):
        run = dataclasses.replace(run, world=run.world.without_places())
    return run


def preflight(run: Run) -> None:
    """Raise Refusal for whatever can be known to fail before anything is changed."""
    run.validate()
    engine = launcher(run.launcher)
    if hasattr(engine, "check"):
        engine.check(run)
    offered = capabilities_of(engine)
    devices = _devices(run)
    where = f"the {run.launcher} launcher" + " across hosts" * (offered != engine.CAPABILITIES)
    if devices != {"cpu"}:
        offered -= {Capability.SHARED_MEMORY}
        where += " on a GPU"
    check_capabilities(run.strategy, offered, where)
    if run.restarts and run.launcher != "local":
        raise Refusal(
            f"restarts is {run.restarts}, and the {run.launcher} launcher does not start replicas again by "
            "that number (docs/launchers.md says what it does). Leave it out, or use --launcher local."
        )
    if run.compression != "none" and run.launcher not in ("torchrun", "ray"):
        raise Refusal(
            f"compression is {run.compression}, and the {run.launcher} launcher keeps all replicas on one "
            "host, where vectors are not sent. Leave it out, or use --launcher torchrun."
        )
    if run.compression != "none" and not run.strategy.needed() & {Capability.MAIL, Capability.REGISTER}:
        raise Refusal(
            f"compression is {run.compression}, and {run.strategy.name} sends nothing that is compressed: "
            "mail and register are, collectives and shared memory are not. Leave it out, or use "
            "--strategy gala."
        )
    if run.strategy.name == "solo" and run.replicas > 1:
        raise Refusal(
            f"solo trains one replica and {run.replicas} were asked for. "
            "Use --replicas 1, or let them agree: --strategy all-reduce."
        )
    agent = _attempt(run)
    vector_bytes = 4 * sum(len(replica) for replica in agent.replicas.values())
    # per replica: its process, optimizer state, and at most three slots in each of two registers
    stored = run.replay_bytes()
    held = run.replicas * (stored if run.replay is None else memory_bytes(run.replay, stored))
    if run.replay is not None and run.replay.folder:
        refuse_full_disk(Path(run.replay.folder), run.replicas * stored)
    needed = run.replicas * (150 * 2**20 + 16 * vector_bytes) + held
    needed += run.replicas * run.actors * 150 * 2**20
    replays = (
        f" (replays take {held // 2**20:,} MiB of it: --replay.capacity, --replay.folder)" if held else ""
    )
    refuse_if_small(needed, f"{run.recipe} with {run.replicas} replica(s){replays}")


def _devices(run: Run) -> set[str]:
    """Kinds of device that the placement names. Raises Refusal for one that is not there."""
    kinds = set()
    for name in run.placement.devices:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise Refusal(f"'{name}' is no device. Use --placement.devices cpu, or cuda:0.") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise Refusal("the placement names a GPU and torch sees none. Use --placement.devices cpu.")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise Refusal(
                f"there is no {name}: torch sees {torch.cuda.device_count()} GPU(s), from cuda:0 up."
            )
        kinds.add(device.type)
    return kinds


def _attempt(run: Run) -> Learner:
    """The agent on a fabric of its own: what is wrong with it or its strategy shows here, not in a role.

    Raises Refusal.
    """
    spec = spec_of(run.world)

    def build(door: Fabric) -> Learner:
        replicate = Replicator(run.strategy, door).replicate
        return run.agent.build(spec, replicate, seed=run.seed, device=torch.device("cpu"))

    size = 1 + run.strategy.centre
    try:
        agent = SimulatedFabric(size, seed=0, keep_log=False).run([build] * size)[0]
    except ValueError as error:
        raise Refusal(f"{run.recipe} cannot be made like this: {error}. Change that field.") from error
    if isinstance(agent, Crashed):
        raise RuntimeError("nobody crashes without being told to")
    return agent


def _fits(run: Run, found: Path, saved: list[int]) -> None:
    """Raise Refusal if a checkpoint is not of this run's network, or not of its simulators."""
    agent = _attempt(run)
    for rank in learners(run, found):
        state = checkpoint.read_part(found, rank)
        try:
            for name, replica in agent.replicas.items():
                saved_state = state["replicas"][name]["replica"]
                replica.load(saved_state)
                if replica.state()["optimizer"].keys() != saved_state["optimizer"].keys():
                    raise ValueError("it was made with another optimizer")
            simulators = len(state["source"].get("first", range(run.simulators)))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise Refusal(
                f"{found} does not fit this run ({error}). Resume with the fields it was made with."
            ) from error
        if simulators != run.simulators:
            raise Refusal(
                f"{found} was made with {simulators} simulators a learner and the run has {run.simulators}. "
                f"Use --simulators {simulators}."
            )


def _carry_out(run: Run, folder: Path, begin: Callable[[Any], Coordinator]) -> Finish:
    coordinator = begin(launcher(run.launcher).start)
    try:
        try:
            with all_is_saved(coordinator):
                code, reason = _how_it_ended(coordinator)
                # who wants it to stop does not want to wait for games; murmurate eval plays them later
                summary = summarize(run, folder, coordinator, reason, games=not coordinator.interrupted)
        except SecondInterrupt:
            code, reason = _how_it_ended(coordinator)
            summary = summarize(run, folder, coordinator, reason, games=False)
    except OSError as error:
        raise checkpoint.disk_failure(folder, error) from error
    return Finish(code, summary)


def _how_it_ended(coordinator: Coordinator) -> tuple[int, str]:
    """(exit code, ``exit`` of the summary)"""
    if isinstance(coordinator.failure, RunFailed):
        return FAILED, f"failed: {coordinator.failure}"
    if coordinator.interrupted:
        return 128 + coordinator.signal, "interrupted"
    return FINISHED, "finished"


def picture(folder: Path) -> None:
    """A strip of pictures of one game for the report, where the world can be drawn here."""
    where = folder / "checkpoints" / "last"
    run = read_run(folder, recipe)
    if checkpoint.damage(where) is None and not isinstance(run.world, ExampleWorld):
        with contextlib.suppress(Refusal):
            write_strip(film(run, where), folder / "videos" / "frames.png")
