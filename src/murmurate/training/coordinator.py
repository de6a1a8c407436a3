"""The launcher's side of a run: requests checkpoints, commits them, ends the run, and keeps its events.

Replicas poll these requests in the run state between two steps; the launcher never blocks them.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

from murmurate.errors import RunFailed
from murmurate.fabric.awake import AwakeClock
from murmurate.fabric.processes.run_state import RunState
from murmurate.record.callbacks import Callbacks, current_watch
from murmurate.record.console import Console
from murmurate.record.loggers import open_loggers
from murmurate.record.reader import Tail
from murmurate.record.recorder import Recorder
from murmurate.record.tensorboard import TensorBoard
from murmurate.training import checkpoint
from murmurate.training.evaluator import Evaluated, Evaluator, Snapshot, best_mean, best_so_far, score
from murmurate.training.interrupts import SecondInterrupt
from murmurate.training.place import FollowedFolder
from murmurate.training.run import Run
from murmurate.training.run_folder import plain
from murmurate.training.worker_context import FINAL, Resume, seconds_to_decision, staging

_CHECKPOINT_DEADLINE_SECONDS = 60.0
_EVALUATION_DEADLINE_SECONDS = 600.0  # the longest wait, at the end, for a running evaluation


class Coordinator:
    """Coordinates one run, which it observes in the run state and in ``metrics.jsonl``.

    in_process: whether all members are in this process. Snapshots are then evaluated between the members'
    steps, and no checkpoint is made by time, because the order of steps must not depend on the clock.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        run_state: RunState,
        started_at: float,
        resume: Resume | None = None,
        *,
        in_process: bool = False,
    ) -> None:
        offset_seconds = 0.0 if resume is None else resume.offset_seconds
        self.run, self.folder, self.run_state, self._clock = run, folder, run_state, AwakeClock()
        watch = current_watch()
        self.checkpoints, self.place = folder / "checkpoints", FollowedFolder(folder)
        self.saving_seconds = run.saving_seconds()
        self.recorder = Recorder(folder / "metrics.jsonl", None, started_at, offset_seconds=offset_seconds)
        self.tail = Tail(folder / "metrics.jsonl")
        self.console = Console(
            run.title,
            run.replicas,
            run.env_steps,
            unit=run.unit,
            curves=run.evaluation.curves,
            target_updates=run.updates,
            target_seconds=None if run.minutes is None else run.minutes * 60,
            elapsed=lambda: self.recorder.seconds,
            quiet=watch.quiet,
        )
        self.tensorboard = TensorBoard(folder / "tensorboard", time.time() - self.recorder.seconds)
        loggers = open_loggers(run.loggers, folder, plain(run))
        self.callbacks = Callbacks([*watch.callbacks, *loggers], offset_seconds)
        self.returns: deque[float] = deque(maxlen=100)
        checkpoint.restore_best(self.checkpoints)
        self.best = best_mean(self.checkpoints)
        self.evaluator = Evaluator(run, in_process)
        self.best_score = best_so_far(run, self.checkpoints)
        self.evaluated_env_steps = 0  # of the last recorded evaluation
        self.dead: list[int] = []
        self.events: list[dict[str, Any]] = []
        self.interrupted, self.signal, self.stopped_because = False, 0, ""
        self.failure: RunFailed | SecondInterrupt | None = None
        self.steps_before, self.seconds_before = 0, offset_seconds  # before the run was resumed
        self.trained_seconds: float | None = None  # when the last replica had ended
        self.skipped_checkpoints = 0  # number given up because deltas were still in flight
        self.is_admitting = False  # a replica is joining: no checkpoint meanwhile
        self._cleared = 0  # staging folders up to this checkpoint number are deleted
        self._pending, self._requested_at = 0, 0.0  # the checkpoint being written (0: none), and since when
        self._next_at_env_steps = self._next_checkpoint_after(run_state.total_env_steps())
        self._every_seconds = None if in_process else run.checkpoint_every_seconds
        self._saving_since = math.inf  # run time at which the first part of the last checkpoint was written
        self._next_at_seconds = self._seconds_of_next_checkpoint()
        self.evaluator.begin_at(run_state.total_env_steps())
        self._clear_staging()
        if (left_out := run.world.skipped()) is not None:
            self.event("skipped", left_out[0], causes=left_out[1])
        if resume is not None:
            self._restore(resume.manifest)

    # -- while it runs ------------------------------------------------------------------------------

    def poll(self) -> None:
        """Read new records; request and commit checkpoints; stop the run. Call it a few times a second."""
        self._follow_folder()
        self._read_records()
        self._commit_if_ready()
        self._give_up_if_late()
        total = self.run_state.total_env_steps()
        may_request = not (self._pending or self.is_admitting)
        if may_request and not self.run_state.stop_requested:
            is_due = total >= self._next_at_env_steps or self.recorder.seconds >= self._next_at_seconds
            # in turn, if both are always due
            after_snapshot = self.run_state.is_snapshot(self.run_state.checkpoint_requested)
            if self.evaluator.is_due(total) and not (is_due and after_snapshot):
                self._request(snapshot=True)
            elif is_due:
                self._next_at_env_steps = self._next_checkpoint_after(total)
                self._request()
        self._take_evaluation(self.evaluator.poll())
        if self.run.minutes is not None and self.recorder.seconds > self.run.minutes * 60:
            self.stop(f"{self.run.minutes:g} minutes have passed")
        if self.run.stop_at_return is not None and self.return_mean(100) >= self.run.stop_at_return:
            self.stop(self.run.return_reached)

    @property
    def should_end(self) -> bool:
        """Whether every replica should be ending now."""
        goal = math.inf if self.run.env_steps is None else self.run.env_steps
        return self.run_state.stop_requested or self.run_state.total_env_steps() >= goal

    def stop(self, why: str) -> None:
        """Tell every replica to finish its step, save, and end; do nothing if ``why`` is empty."""
        if why and not self.stopped_because:
            self.stopped_because = why
            self.event("stopping", f"stopping: {why}")
            self.run_state.request_stop()

    def died(self, rank: int, how: str, error: str = "") -> None:
        """Note that a worker ended: from now on no member waits for it. error: its last exception. Raises
        RunFailed if it was the centre."""
        details = {"error": error} if error else {}
        if rank in self.dead:
            if self.run_state.is_alive(rank):  # it was about to join again
                self.run_state.mark_dead(rank)
            self.event("died", f"{self.name(rank)} could not join ({how})", member=rank, **details)
            return
        self.run_state.mark_dead(rank)
        self.dead.append(rank)
        survivors = [member for member in self.run_state.living() if member < self.run.replicas]
        consequence = f"{len(survivors)} go on" if rank < self.run.replicas else "the run stops"
        message = f"{self.name(rank)} died ({how}); {consequence}"
        self.event("died", message, member=rank, epoch=self.run_state.epoch, **details)
        if rank >= self.run.replicas:
            raise RunFailed(f"the centre died ({how}), and with it its state.")

    def failed(self, rank: int, error: str) -> RunFailed:
        """The exception to raise for a worker whose ``error`` ends the run; also recorded as an event."""
        message = f"{self.name(rank)}: {error}"
        self.event("died", message, member=rank, error=error)
        return RunFailed(message)

    def joined(self, rank: int, donor: int) -> None:
        """Note that a replica that had died has joined the run again, with the state of ``donor``."""
        self.run_state.mark_joined(rank)
        self.dead.remove(rank)
        message = f"replica {rank} is back, with the state of replica {donor}"
        self.event("joined", message, member=rank, epoch=self.run_state.epoch)

    def name(self, rank: int) -> str:
        return f"replica {rank}" if rank < self.run.replicas else "the centre"

    @property
    def is_saving(self) -> bool:
        """Whether a requested checkpoint is not complete yet."""
        return bool(self._pending)

    def event(self, name: str, message: str, **fields: Any) -> None:
        state, replicas = self.run_state, range(self.run.replicas)
        counts = {"env_steps": state.total_env_steps(), "updates": max(map(state.clock, replicas))}
        self.recorder.event(name, message, **counts, **fields)
        self.events.append(
            {"event": name, "message": message, "time_seconds": round(self.recorder.seconds, 3), **fields}
        )

    def return_mean(self, least: int = 1) -> float:
        return sum(self.returns) / len(self.returns) if len(self.returns) >= least else float("nan")

    def _follow_folder(self) -> None:
        """If the run folder was moved, stop the run and write the rest at the new path. Raises FolderGone."""
        now = self.place.current_path()
        if now != self.folder:
            self.folder, self.checkpoints = now, now / "checkpoints"
            self.tail.path, self.tensorboard.folder = now / "metrics.jsonl", now / "tensorboard"
            self.stop(f"the run folder was moved to {now}")

    def _read_records(self) -> None:
        records = self.tail.poll()
        for record in records:
            pairs = record.get("episode_returns") or ()
            self.returns.extend(pair[0] for pair in pairs if pair[0] is not None)
        self.console.feed(records, self.run_state.total_env_steps())
        self.console.refresh()
        try:
            self.tensorboard.feed(records)
        except OSError as error:
            raise checkpoint.disk_failure(self.tensorboard.folder, error) from error
        self.stop(self.callbacks.records(records))

    # -- checkpoints and evaluations ----------------------------------------------------------------

    def _request(self, snapshot: bool = False) -> None:
        self._pending, self._requested_at = self.run_state.request_checkpoint(snapshot), self._clock.now()
        self._saving_since = math.inf

    def _seconds_of_next_checkpoint(self) -> float:
        """When the next checkpoint is due by time. The wait is at least 20 times what the last save
        took, so that saving takes at most about a twentieth of the run."""
        every, now = self._every_seconds, self.recorder.seconds
        return math.inf if every is None else now + max(every, 20 * (now - self._saving_since))

    def _next_checkpoint_after(self, total: int) -> int:
        every = self.run.checkpoint_every_env_steps
        return (total // every + 1) * every

    def _commit_if_ready(self) -> None:
        if not self._pending:
            return
        snapshot, name = self.run_state.is_snapshot(self._pending), str(self._pending)
        if self._saving_since == math.inf and staging(self.folder, name).exists():
            self._saving_since = self.recorder.seconds
        if not self.run_state.saved_by_all(self._pending):
            return
        self._pending = 0
        if self._complete(name):
            (self._begin_evaluation if snapshot else self._commit)(name)
        if not snapshot:
            self._next_at_seconds = self._seconds_of_next_checkpoint()
        # the folders of checkpoints that were given up: no replica writes to them any more
        for number in range(self._cleared + 1, int(name)):
            shutil.rmtree(staging(self.folder, str(number)), ignore_errors=True)
        self._cleared = int(name)

    def _give_up_if_late(self) -> None:
        """Give up a checkpoint that one replica holds up; a later request replaces it.

        Its parts stay until a later checkpoint is complete: another replica may still be writing its part.
        """
        if self._pending and (late_ranks := self.run_state.skipped_by(self._pending)):
            self.skipped_checkpoints += 1
            names = " and ".join(self.name(rank) for rank in late_ranks)
            message = f"checkpoint {self._pending} is skipped: deltas to {names} did not arrive in time"
            self.event("checkpoint skipped", message, member=late_ranks[0])
            self._end_pending()
        until_late = _CHECKPOINT_DEADLINE_SECONDS + self.saving_seconds
        allowed = until_late + 3 * seconds_to_decision(self.run, self.run_state)
        if self._pending and self._clock.now() - self._requested_at > allowed:
            self.event("warning", f"checkpoint {self._pending} was given up: not every replica answered")
            self._end_pending()

    def _end_pending(self) -> None:
        if self.run_state.is_snapshot(self._pending):
            self.evaluator.begin_at(self.run_state.total_env_steps())
        else:
            self._next_at_seconds = self._seconds_of_next_checkpoint()
        self._pending = 0

    def _complete(self, name: str) -> bool:
        """Add the final parts of replicas that had ended before; False if no run could be resumed from it."""
        folder = staging(self.folder, name)
        if not folder.exists():
            return False
        ranks = checkpoint.parts(folder)
        for rank in self.run_state.living():
            if rank not in ranks:  # it has ended, or joined after the request and has nothing to link
                checkpoint.link_part(staging(self.folder, FINAL), folder, rank)
        return not checkpoint.lacks(folder, self.run)

    def commit_final(self, goes_on: bool = False) -> bool:
        """Commit the replicas' final parts; returns False if there are none. Raises RunFailed if the run
        folder was moved: the user looks for it at its old path.

        goes_on: whether the run goes on, in another epoch; a running evaluation then does so, too."""
        self.trained_seconds = self.recorder.seconds
        self._follow_folder()
        self._read_records()
        self._pending = self._cleared = 0  # requests of another epoch are counted from 1
        saved = not checkpoint.lacks(staging(self.folder, FINAL), self.run)
        if saved:
            self._commit(FINAL)
            if not goes_on:
                self._await_evaluation()
            self._clear_staging()
        if self.folder != self.place.original_path:
            raise RunFailed(f"the run folder {self.place.original_path} was moved to {self.folder}.")
        return saved

    def _commit(self, name: str) -> None:
        self._read_records()
        mean, fields = self.return_mean(100), self._manifest_fields(name)
        checkpoint.commit(self.checkpoints, staging(self.folder, name), fields)
        # before there are 100 returns the newest is the best: episodes that end first are not like others
        is_better = mean > self.best or (self.best == -math.inf and bool(self.returns))
        self.best = max(self.best, mean)  # the former if the mean is NaN
        # if evaluations choose the best checkpoint, training returns do not
        if is_better and not (self.run.evaluate_every_env_steps and self.run.evaluation.plays):
            checkpoint.keep_as_best(self.checkpoints)
        self.event("checkpoint", f"checkpoint at {fields['env_steps']:,} {self.run.unit}")
        self.stop(self.callbacks.checkpoint(self.checkpoints / "last"))

    def _manifest_fields(self, name: str) -> dict[str, Any]:
        """The fields, beside the digests, of the manifest of the parts in a staging folder."""
        best = max(self.best, self.return_mean(100))  # the former if the mean is NaN
        saved = checkpoint.parts(staging(self.folder, name))
        counts = [
            checkpoint.env_steps(staging(self.folder, name), rank)
            if rank in saved
            else self.run_state.env_steps(rank)
            for rank in range(self.run.replicas)
        ]
        return {
            "env_steps": sum(counts),
            "replica_env_steps": counts,
            "seconds": self.recorder.seconds,
            "replicas": self.run.replicas,
            "living": list(self.run_state.living()),
            "dead": self.dead,
            "best": None if best == float("-inf") else best,
            "evaluated_env_steps": self.evaluated_env_steps if self.run.evaluate_every_env_steps else None,
        }

    def _begin_evaluation(self, name: str) -> None:
        source, folder = staging(self.folder, name), staging(self.folder, "evaluated")
        fields = self._manifest_fields(name)
        learners = [rank for rank in checkpoint.parts(source) if rank < self.run.replicas]
        updates = int(statistics.median(checkpoint.updates(source, rank) for rank in learners))
        try:
            checkpoint.complete(source, fields)
            shutil.rmtree(folder, ignore_errors=True)
            source.rename(folder)
        except OSError as error:
            raise checkpoint.disk_failure(source, error) from error
        self.evaluator.begin(Snapshot(folder, fields["env_steps"], updates, fields["seconds"]))

    def _await_evaluation(self) -> None:
        """Wait for the running evaluation, unless the user interrupts, or it takes too long."""
        deadline = self._clock.now() + _EVALUATION_DEADLINE_SECONDS
        while self.evaluator.is_busy and not self.interrupted and self._clock.now() < deadline:
            self._take_evaluation(self.evaluator.poll(wait_seconds=0.1))
        if self.evaluator.is_busy:
            self.event("evaluation failed", "the evaluation that was running at the end was not waited for")
        self.evaluator.close()

    def _take_evaluation(self, ended: Evaluated | None) -> None:
        """Record an evaluation that has ended; its snapshot (which moves with the folder) may be the best."""
        if ended is None:
            return
        at = f"{ended.snapshot.env_steps:,} {self.run.unit}"
        if ended.failure:
            self.event(
                "evaluation failed", f"the evaluation at {at} failed ({ended.failure}); the run goes on"
            )
        else:
            self._record_evaluation(ended, at)
        shutil.rmtree(staging(self.folder, "evaluated"), ignore_errors=True)

    def _record_evaluation(self, ended: Evaluated, at: str) -> None:
        self.recorder.record(ended.record(self.run.evaluation.sentence(ended.figures), at))
        self.evaluated_env_steps = ended.snapshot.env_steps
        if (value := score(self.run, ended.figures)) > self.best_score:
            self.best_score = value
            checkpoint.keep_as_best(self.checkpoints, staging(self.folder, "evaluated"), score=value)

    def _clear_staging(self) -> None:
        kept = {staging(self.folder, "evaluated")} if self.evaluator.is_busy else set()
        for leftover in set(self.checkpoints.glob(".staging-*")) - kept:
            shutil.rmtree(leftover, ignore_errors=True)

    def _restore(self, manifest: dict[str, Any]) -> None:
        self.steps_before = int(manifest["env_steps"])
        # the returns so far are read from metrics.jsonl
        self._next_at_env_steps = self._next_checkpoint_after(int(manifest["env_steps"]))
        evaluated = manifest.get("evaluated_env_steps")  # None without evaluations, and in old checkpoints
        self.evaluated_env_steps = int(manifest["env_steps"] if evaluated is None else evaluated)
        self.evaluator.begin_at(self.evaluated_env_steps)
        self.event("resumed", f"resumed at {manifest['env_steps']:,} {self.run.unit}")

    def close(self) -> None:
        """Never raises for a full disk: what does not fit can be rebuilt from ``metrics.jsonl``."""
        with contextlib.suppress(OSError, RunFailed):
            self._follow_folder()
            self._read_records()
        self.evaluator.close()
        with contextlib.suppress(OSError):
            self.tensorboard.close()
        self.recorder.close()
        self._clear_staging()
        self.place.close()
