"""``train`` and ``resume``: from a Run, or a run folder, to a finished run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, RunFailed, cause_of
from murmurate.evaluation.interface import reporting
from murmurate.record.callbacks import Result, current_watch
from murmurate.record.reader import truncate_after
from murmurate.record.stored import UNSOUND, read_object
from murmurate.replica.state_dict import refuse_not_finite
from murmurate.training import checkpoint, run_folder
from murmurate.training.data_record import check_data, record_data, refuse_missing
from murmurate.training.interrupts import SecondInterrupt, signals, signals_ignored, signals_restored
from murmurate.training.launcher import Launcher, Ranks
from murmurate.training.manifest import MANIFEST_NAME
from murmurate.training.own_files import warn_of_changes
from murmurate.training.place import FolderGone, FollowedFolder
from murmurate.training.preflight import build_once, preflight, prepared, resolved
from murmurate.training.restore import (
    learners,
    load_agent,
    refusing_misfits,
    warn_of_other_classes,
    without_initial,
)
from murmurate.training.resumed_settings import (
    reached_end,
    reached_return,
    refuse_changes,
    refuse_past_ends,
)
from murmurate.training.run import Run
from murmurate.training.run_folder import claim, claim_new, has_begun, locked, unclaim, write_run
from murmurate.training.summary import summarize
from murmurate.training.worker_context import Resume, parts_to_resume

FINISHED, FAILED, REFUSED = 0, 1, 2
_CHECKPOINTS = ("last", "previous")  # those from which a run can be resumed


@dataclasses.dataclass
class Finish:
    """How a run ended: the exit code of the command line, and ``summary.json``.

    summary: None if another process leads the run and reports it. folder: the run folder, relative as it was
    given or chosen, unless the run was moved. run: the run that ended. error: what a callback or the
    evaluation raised, if that ended the run. evaluation_cut: whether training was complete and a signal ended
    the evaluation. command_prefix: see ``Launcher``.
    """

    code: int
    summary: dict[str, Any] | None
    folder: Path
    run: Run | None = None
    error: Exception | SystemExit | None = None
    evaluation_cut: bool = False
    command_prefix: str = ""

    @property
    def resumable(self) -> bool:
        """Whether the run could go on from a checkpoint: simulated ones cannot."""
        return self.run is None or self.run.launcher != "simulated"

    @property
    def sentence(self) -> str:
        """The evaluation's result, for the console."""
        if self.run is None or self.summary is None:
            return ""
        learned = self.code != FINISHED or self.summary["updates"]
        advice = "" if learned else " It ended before the first update: make the run longer."
        said, headline = self.run.evaluation.sentence(self.summary), self.run.evaluation.headline
        if not said and self.code == FINISHED and headline is not None and headline.metric in self.summary:
            said = "Its evaluation gave no finite figure, or there was nothing to evaluate on."
        return said + advice


@signals_restored()
def train(
    run: Run,
    folder: Path | None,
    launcher: Launcher,
    read: Callable[[Path], Run],
    name: str = "",
    goes_on: bool = False,
) -> Finish:
    """Check all that can be checked in advance, then run. Raises Refusal before anything is changed.

    folder: None for a new one below ``runs``, named by ``name`` or the recipe. read: returns the Run of a run
    folder (``recipes.stored``). goes_on: if ``folder`` holds this run, with a checkpoint, go on from there,
    or return its end if it has finished; without a checkpoint, rename what is there and begin.
    """
    if goes_on and folder is None:
        raise Refusal(
            "--continue (in Python: resume) is for the run in a folder. Name the folder: --out (in Python: "
            "out)."
        )
    run, ranks = prepared(run, launcher), launcher.adopt()
    if ranks is not None and not ranks.leads:
        return _follow(ranks, run, read)
    run, name = resolved(run), name or run.recipe
    with contextlib.nullcontext() if ranks is None else _refuse_all_ranks(ranks):
        earlier = None if ranks is None else ranks.earlier_folder()
        known = folder if earlier is None and goes_on else earlier
        if known is not None and _has_checkpoint(known):
            if (end := _end_of_finished(known, run, read)) is not None:
                if ranks is not None:
                    ranks.finished(known)
                return end
            return resume(known, lambda name: launcher, read, lambda _: run)
        if earlier is not None:
            unclaim(earlier, existed=True)
        elif known is not None:
            _make_room(known)
        return _begin(run, earlier or folder, name, launcher, ranks)


def _has_checkpoint(folder: Path) -> bool:
    """Also if it is damaged: a resume may still find enough, and deletes nothing."""
    return any(os.path.exists(folder / "checkpoints" / name / MANIFEST_NAME) for name in _CHECKPOINTS)


def _end_of_finished(folder: Path, run: Run, read: Callable[[Path], Run]) -> Finish | None:
    """How the run in ``folder`` ended, if it is ``run`` and has finished."""
    summary = _finished_summary(folder)
    if summary is None or read(folder) != run:
        return None
    return _end_told(f"{folder} holds this run, which has finished", summary, folder, run)


def _end_told(told: str, summary: dict[str, Any], folder: Path, run: Run) -> Finish:
    if not current_watch().quiet:
        print(told)
    return Finish(FINISHED, summary, folder, run)


def _finished_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of the run in ``folder``, if it has finished."""
    try:
        summary = read_object(folder / "summary.json")
    except (OSError, *UNSOUND):
        return None
    return summary if summary.get("exit") == "finished" else None


def _make_room(folder: Path) -> None:
    """Rename ``folder``, if it holds a run that saved nothing. Raises Refusal if that run goes on."""
    if not os.path.isdir(folder / "checkpoints"):
        return
    if not any(folder.glob("run.json*")) and [path.name for path in folder.rglob("*")] != ["checkpoints"]:
        return  # it holds something else
    with locked(folder):
        pass
    try:
        place = run_folder.set_aside(folder)
    except (OSError, ValueError) as error:  # ``.`` has no name
        raise Refusal(
            f"{folder} holds a run that saved no checkpoint, and cannot be renamed ({cause_of(error)}). "
            "Empty it, or choose another with --out."
        ) from error
    warnings.warn(f"the run in {folder} had saved no checkpoint; it is now {place}", stacklevel=2)


def _follow(ranks: Ranks, run: Run, read: Callable[[Path], Run]) -> Finish:
    folder, code = ranks.follow(run, read)
    return Finish(code, None, folder)


@contextlib.contextmanager
def _refuse_all_ranks(ranks: Ranks) -> Iterator[None]:
    """If the leader refuses, let the other ranks end too."""
    try:
        yield
    except Refusal:
        ranks.refuse()
        raise


def _begin(run: Run, given: Path | None, name: str, launcher: Launcher, ranks: Ranks | None) -> Finish:
    with claimed(given, name, launcher.command_prefix) as folder:
        if ranks is not None:
            ranks.claimed(folder)
        write_run(folder, run)
        record_data(folder, run.world)
        warn_of_other_classes(run, folder)
        return _carry_out(run, folder, launcher, None)


@contextlib.contextmanager
def claimed(requested: Path | None, name: str, command_prefix: str = "") -> Iterator[Path]:
    """Used around a new run: makes its folder (``requested``, or a ``new_folder`` of ``name``), and locks
    it. A run that fails or is interrupted before it has recorded or saved anything leaves nothing. Raises
    Refusal if the folder cannot be made or written."""
    existed = requested is not None and os.path.exists(requested)
    if requested is not None:
        claim(requested)
    chosen = claim_new(name) if requested is None else requested
    place = FollowedFolder(folder := chosen.absolute())  # the user's code may change the working folder
    try:
        with locked(folder):
            yield chosen
    except FolderGone:
        raise
    except BaseException as error:
        if place.current_path() != folder or has_begun(folder):
            if isinstance(error, Refusal):
                kept = checkpoint.kept_sentence(place.current_path(), command_prefix=command_prefix)
                raise RunFailed(f"{error} {kept}") from error
            raise
        unclaim(folder, existed)
        if isinstance(error, OSError):
            raise Refusal(
                f"{folder} cannot be written: {cause_of(error)}. Make room, or choose another with --out."
            ) from error
        raise
    finally:
        place.close()


@signals_restored()
def resume(
    folder: Path,
    find_launcher: Callable[[str], Launcher],
    read: Callable[[Path], Run],
    changes: Callable[[Run], Run] = lambda run: run,
    relocate: Callable[[Run], Run] = lambda run: run,
) -> Finish:
    """Resume from a run folder's newest complete checkpoint; ``changes`` may move the run's end.

    A run that has reached its end, was evaluated, and is not changed, is left alone; its end is returned.

    find_launcher: returns a launcher by name. read: see ``train``. relocate: names what the run needs where
    it is found now, in ways that ``changes`` may not.
    Raises Refusal, with nothing changed, if there is no checkpoint or it belongs to another run.
    """
    recorded = read(folder)
    stored = relocate(recorded)
    run = changes(stored)
    if stored.launcher == "simulated":
        raise Refusal(f"{folder} holds a simulated run, which cannot be resumed. Simulate anew with --out.")
    refuse_missing(run.world)
    launcher = find_launcher(run.launcher)
    preflight(without_initial(run), launcher)
    ranks = launcher.adopt()
    if ranks is not None and not ranks.leads:
        return _follow(ranks, run, read)
    with contextlib.nullcontext() if ranks is None else _refuse_all_ranks(ranks):
        with locked(folder):
            check_data(folder, run.world)  # first, because with other data a checkpoint may not fit either
            newest = checkpoint.newest(folder / "checkpoints", lambda path: _check_fits(run, folder, path))
            warn_of_changes(folder, stored)
            if stored != recorded:
                write_run(folder, stored)
            if run == stored and (end := _end_of_reached(run, folder, newest)) is not None:
                if ranks is not None:
                    ranks.finished(folder)
                return end
            with run_folder.restored_if_refused(folder, "run.json", "summary.json"):
                return _continue(run, stored, folder, newest, launcher)


def _continue(run: Run, stored: Run, folder: Path, newest: Path, launcher: Launcher) -> Finish:
    manifest = checkpoint.read_manifest(newest)
    saved = checkpoint.parts(newest)
    learners = [rank for rank in saved if rank < run.replicas]
    parts = parts_to_resume(saved, run.replicas)
    refuse_changes(run, stored, folder)
    refuse_past_ends(run, stored, folder, newest)
    # each replica saved at a different time, and the checkpoint was complete after the last of them
    counts = {rank: checkpoint.env_steps(newest, rank) for rank in saved}
    clocks = {rank: checkpoint.updates(newest, rank) for rank in learners}
    seconds = float(manifest["seconds"])
    if run != stored:
        write_run(folder, run)
    record_data(folder, run.world)  # again, if the record was deleted
    if newest.name != "last":
        checkpoint.set_aside(newest.with_name("last"))
    truncate_after(folder / "metrics.jsonl", env_steps=counts, updates=clocks, time_seconds=seconds)
    (folder / "summary.json").unlink(missing_ok=True)  # of the end that the run now goes beyond
    return _carry_out(run, folder, launcher, Resume(newest.resolve(), parts, manifest, seconds))


def _end_of_reached(run: Run, folder: Path, newest: Path) -> Finish | None:
    """How the run in ``folder`` ended, if it has reached its end and was evaluated."""
    summary, headline = _finished_summary(folder), run.evaluation.headline
    if summary is None or headline is None or summary.get(headline.metric) is None:
        return None
    if not (end := reached_end(run, newest) or reached_return(run, summary)):
        return None
    return _end_told(f"{folder} holds a run that has finished: {end}", summary, folder, run)


def _check_fits(run: Run, folder: Path, candidate: Path) -> None:
    """Raise Refusal if the checkpoint ``candidate`` is of another network or source, or is damaged in a way
    that its digests do not show."""
    count = checkpoint.read_manifest(candidate)["replicas"]
    if run.replicas != count:
        raise Refusal(f"{folder} was made with {count} replicas; resume with the same number.")
    if missing := checkpoint.lacks(candidate, run):
        raise Refusal(f"{candidate} lacks the part of {missing}.")
    learner = build_once(without_initial(run))
    for rank in learners(candidate, run.replicas):
        state = checkpoint.read_part(candidate, rank)
        checkpoint.updates(candidate, rank)  # raises Refusal if the count is unreadable
        with refusing_misfits(candidate):
            for name, replica in learner.replicas.items():
                saved_state = state["replicas"][name]["replica"]
                replica.load(saved_state)
                refuse_not_finite(replica.values(), f"a parameter of '{name}'")
                if replica.state()["optimizer"].keys() != saved_state["optimizer"].keys():
                    raise ValueError("it was made with another optimizer")
            run.source.check_state(state["source"])
    load_agent(run, candidate)  # also checks what is used of the centre's part


def _carry_out(run: Run, given: Path, launcher: Launcher, resume: Resume | None) -> Finish:
    raised: Exception | SystemExit | None = None
    is_complete = evaluation_cut = False
    folder = given.absolute()

    def kept() -> str:
        return checkpoint.kept_sentence(folder, command_prefix=launcher.command_prefix)

    try:
        coordinator = launcher.start(run, folder, resume)
        folder = coordinator.folder  # it may have been moved
        if isinstance(coordinator.failure, FolderGone):
            raise coordinator.failure
        try:
            with signals(coordinator, all_saved=True):
                code, reason = exit_status(coordinator)
                is_complete = code == FINISHED
                # no evaluation after an interrupt: murmurate eval can do it later
                evaluated = not coordinator.interrupted
                said = reporting(functools.partial(print, flush=True), "; Ctrl-C skips")
                with contextlib.nullcontext() if current_watch().quiet else said:
                    summary = summarize(run, folder, coordinator, reason, evaluated=evaluated)
        except SecondInterrupt:
            evaluation_cut = is_complete
            with signals_ignored():  # two quick Ctrl-C would leave no summary
                code, reason = exit_status(coordinator)
                summary = summarize(run, folder, coordinator, reason, evaluated=False)
        except Exception as problem:
            if isinstance(problem, FolderGone):
                raise
            raised = None if isinstance(problem, Refusal | RunFailed | OSError | MemoryError) else problem
            code, reason = exit_status(coordinator)
            if is_complete:
                evaluation_cut = True
                cause = f"{type(problem).__name__}: {str(problem).rstrip('.')}"
                code, reason = FAILED, f"failed: training is complete, and its evaluation raised {cause}"
            summary = summarize(run, folder, coordinator, reason, evaluated=False)
    except FolderGone:
        raise
    except KeyboardInterrupt as interrupt:  # it cut the cleanup after a second one, or the start of a resume
        if has_begun(folder):
            interrupt.args = (kept(),)
        raise
    except RunFailed as failure:
        raise RunFailed(f"{failure} {kept()}") from failure
    except OSError as error:
        raise RunFailed(f"{checkpoint.disk_failure(folder, error)} {kept()}") from error
    coordinator.callbacks.end(Result(folder, summary, code))
    folder = given if folder == coordinator.place.original_path else folder
    raised = coordinator.callbacks.error or raised
    return Finish(code, summary, folder, run, raised, evaluation_cut, launcher.command_prefix)


def exit_status(observer: Any) -> tuple[int, str]:
    """(exit code, ``exit`` of the summary). observer: the coordinator, or the monitor of a simulation."""
    if isinstance(observer.failure, RunFailed):
        return FAILED, f"failed: {observer.failure}"
    if observer.interrupted:
        return 128 + observer.signal, "interrupted"
    if observer.callbacks.failure:
        return FAILED, f"failed: {observer.callbacks.failure}"
    return FINISHED, "finished"
