"""A study: trials of one recipe with different hyper-parameters, each a run folder, guided by Optuna."""

from __future__ import annotations

import shlex
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, RunFailed
from murmurate.record.figures import number_text
from murmurate.record.stored import UNSOUND, read_object
from murmurate.training.run import Run
from murmurate.training.run_folder import plain, set_aside
from murmurate.tuning import run_process
from murmurate.tuning.drawings import short_word
from murmurate.tuning.objective import Objective, TrialProgress
from murmurate.tuning.page import write_page
from murmurate.tuning.run_process import INTERRUPTED, HeldRun, Running, RunProcess
from murmurate.tuning.space import Dimension, words
from murmurate.tuning.trials import HeldTrial, Trials, database_errors

FILE = "study.json"
_MOST_FAILURES = 3  # if as many trials fail before one has finished, the study ends


@dataclass
class Study:
    """``murmurate tune``.

    run: the trials' run, before the searched fields are set. words: ``train`` and its arguments, as in the
    command that would train ``run``. options: options that only ``murmurate tune`` has, for the command that
    continues the study. folder: holds ``study.json``, ``study.db``, ``trial-<n>/`` (a run folder) and
    ``trial-<n>.log`` of each trial, and ``report.html``. with_options: the run that ``words`` train
    with more options. trials: number of trials, those of earlier commands included. minutes: after which no
    trial is started. jobs: number of trials at once.
    """

    run: Run
    words: Sequence[str]
    options: Sequence[str]
    space: Sequence[Dimension]
    objective: Objective
    folder: Path
    with_options: Callable[[Sequence[str]], Run]
    trials: int = 30
    minutes: float | None = None
    jobs: int = 1
    sampler: str = "tpe"
    pruner: str = "median"
    say: Callable[[str], None] = print
    _failures: list[str] = field(default_factory=list, init=False)

    def tune(self) -> int:
        """Train trials to the end of the study, print the best setting and write the page. Returns the exit
        code. Raises Refusal for a folder, sampler or pruner that cannot be used; MissingExtra without Optuna;
        RunFailed if no trial finishes, none has the objective's figure, or the database fails."""
        self._claim()
        if warning := run_process.changed_files(self.folder.glob("trial-*"), self.run):
            self.say(warning)
        self._trials = self._opened()
        self._end = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        with database_errors(self.folder):
            return self._tune()

    def _tune(self) -> int:
        stopped = run_process.run_all(self._start, self._ended, self.jobs, self._watch)
        if self._is_hopeless():
            raise RunFailed(f"The first {_MOST_FAILURES} trials failed. The last one: {self._failures[-1]}")
        if stopped:
            done = sum(trial.state.is_finished() for trial in self._trials.all())
            if self._trials.best() is not None:
                rewrite_page(self.folder)
            self.say(
                f"The study was stopped after {done} of {self.trials} trials. Go on with: {self.command}"
            )
            return 128 + stopped
        return self._conclude()

    @property
    def command(self) -> str:
        """The command that continues this study."""
        return shlex.join(["murmurate", "tune", *self.words[1:], *self.options, "--out", str(self.folder)])

    def _claim(self) -> None:
        """Write ``study.json``. Raises Refusal if the folder holds anything but this study, or it with
        another objective where a trial has finished, was pruned or is trained by another process."""
        path = self.folder / FILE
        settings = {
            "run": plain(self.run),
            "space": [dimension.plain() for dimension in self.space],
            "objective": [self.objective.name, self.objective.direction],
        }
        if path.exists():
            try:
                stored = read_object(path)
                stored["run"] = run_process.with_younger_fields(stored["run"], self.run)
                differing = [name for name in settings if stored[name] != settings[name]]
                name, direction = stored["objective"]
                earlier = f"{name}:{direction[:3]}"
            except (OSError, *UNSOUND) as error:
                raise Refusal(f"{path} cannot be read ({error}). Choose another folder: --out.") from error
            if differing == ["objective"] and self._opened().renew(self.objective.direction):
                self._write(settings)
            elif differing:
                command = str(stored.get("command", "murmurate tune"))
                if "objective" in differing and "--objective" not in command:
                    # by default, earlier versions took another one
                    command += f" --objective {shlex.quote(earlier)}"
                if "run" in differing:  # of the run, its fields are named
                    changed = sorted(n for n, v in settings["run"].items() if stored["run"][n] != v)
                    differing = [*changed, *differing[1:]]
                raise Refusal(
                    f"{self.folder} holds a study with another {', '.join(differing)}. Go on with it: "
                    f"{command}; or choose another folder with --out."
                )
            return
        run_process.check_free(self.folder, "study")
        self._write(settings)

    def _opened(self) -> Trials:
        direction = self.objective.direction
        return Trials(self.folder, self.space, direction, self.sampler, self.pruner, self.run.seed)

    def _write(self, settings: dict[str, Any]) -> None:
        content = {**settings, "command": self.command, "train": list(self.words)}
        run_process.write_settings(self.folder, FILE, content)

    # -- trials -------------------------------------------------------------------------------------------

    def _start(self) -> tuple[_Trial, Running] | None:
        is_late = self._end is not None and time.monotonic() > self._end
        if is_late or self._is_hopeless() or (held := self._trials.next(self.trials)) is None:
            return None
        folder = self.folder / f"trial-{held.number:04d}"
        options = words(self.space, held.trial.params)
        run = self.with_options(options)  # its budget may be searched, too
        trial = _Trial(held, folder, TrialProgress(self.objective, run, folder))
        if run_process.has_finished(folder):  # an earlier command was killed before it told Optuna
            return trial, HeldRun(folder)
        if run_process.is_held(folder):
            self.say(f"trial {held.number}: another process trains it; waiting for its end")
            trial.foreign = True
            return trial, HeldRun(folder)
        if run_process.can_resume(folder):
            command = ["resume", str(folder)]
            self.say(f"trial {held.number}: was cut off, goes on from its checkpoint")
        else:
            set_aside(folder)
            command = [*self.words, *options, "--out", str(folder)]
        threads = 1 if self.jobs > 1 else None
        return trial, RunProcess(command, folder.with_suffix(".log"), threads)

    def _watch(self, trial: _Trial, process: Running) -> None:
        """Report the trial's progress to the study, and end it where the pruner says so."""
        if trial.pruned or trial.foreign:
            return
        for step, value in trial.progress.poll():
            if step not in trial.held.reported:
                trial.held.reported.add(step)
                trial.held.trial.report(value, step)
            if trial.held.trial.should_prune():
                trial.pruned = True
                process.signal(signal.SIGINT)
                return

    def _ended(self, trial: _Trial, code: int) -> None:
        held, name = trial.held, f"trial {trial.held.number}"
        values = ", ".join(f"{key} {short_word(value)}" for key, value in held.trial.params.items())
        try:
            # a run that has finished may still be ended by a signal, before its process has gone
            if code == 0 or run_process.has_finished(trial.folder):
                value = self.objective.of(run_process.summary(trial.folder) or {})
                if value is None:
                    self._fail(held, f"it has no {self.objective.name}")
                else:
                    self._trials.completed(held, value)
                    outcome = f"{self.objective.name} {number_text(value)}{self._best_so_far()}"
                    self.say(f"{name}: {outcome} ({values})")
            elif trial.pruned:
                self._trials.pruned(held)
                self.say(f"{name}: pruned ({values})")
            elif trial.foreign or code in (INTERRUPTED, run_process.TERMINATED):
                pass  # the trial stays unfinished; this command goes on with it, or the next one
            else:
                self._fail(held, _reason(trial.folder.with_suffix(".log")) or f"exit code {code}")
        finally:
            held.release()

    def _fail(self, held: HeldTrial, why: str) -> None:
        self._trials.failed(held, why)
        self._failures.append(why)
        self.say(f"trial {held.number}: failed: {why}")

    def _is_hopeless(self) -> bool:
        return len(self._failures) >= _MOST_FAILURES and self._trials.best() is None

    def _best_so_far(self) -> str:
        best = self._trials.best()
        return "" if best is None else f", best {number_text(best.value)} of trial {best.number}"

    # -- the end ------------------------------------------------------------------------------------------

    def _conclude(self) -> int:
        best, values = self._trials.best(), self._trials.values()
        if best is None:
            raise RunFailed("No trial of the study has finished. See the .log files in " + str(self.folder))
        ends = [trial.state.name for trial in self._trials.all()]
        counts = ", ".join(f"{ends.count(name)} {text}" for name, text in _ENDS.items() if name in ends)
        self.say(counts.replace("trials", "trial") if counts.startswith("1 ") else counts)
        self.say(
            f"Best: {self.objective.name} {number_text(best.value)}, trial {best.number} "
            f"(median of the finished trials {number_text(statistics.median(values))})"
        )
        for name, value in best.params.items():
            self.say(f"  {name} {short_word(value)}")
        page, train = rewrite_page(self.folder)
        self.say(f"The study's page: {page}")
        self.say(f"To train with it: {train}")
        return 0


def rewrite_page(folder: Path) -> tuple[Path, str]:
    """Write the page of the study in ``folder`` anew; returns its path and the command that trains the best
    setting. Raises Refusal for a damaged study, and for one without a finished trial."""
    try:
        stored = read_object(folder / FILE)
        space = [Dimension(**{**fields, "choices": tuple(fields["choices"])}) for fields in stored["space"]]
        objective = Objective(stored["objective"][0], stored["objective"][1] == "minimize")
        recipe, train_words = str(stored["run"]["recipe"]), [str(word) for word in stored["train"]]
    except (OSError, *UNSOUND) as error:
        raise Refusal(f"{folder / FILE} cannot be read ({error}). Name the trials' own folders.") from error
    trials = Trials(folder, space, objective.direction, "random", "none", seed=0)
    best = trials.best()
    if best is None:
        raise Refusal(f"No trial of the study in {folder} has finished yet. Go on with: {stored['command']}")
    train = shlex.join(["murmurate", *train_words, *words(space, best.params)])
    return write_page(folder, recipe, trials.study, objective, space, train), train


@dataclass
class _Trial:
    """A trial in progress. pruned: whether it was told to end. foreign: whether another process, left by a
    killed command, trains it."""

    held: HeldTrial
    folder: Path
    progress: TrialProgress
    pruned: bool = False
    foreign: bool = False


_ENDS = {"COMPLETE": "trials finished", "PRUNED": "pruned", "FAIL": "failed"}


def _reason(log: Path) -> str:
    """Why the run failed: the last message in its output that is no warning; without one, the last line."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    messages = [line.removeprefix("murmurate: ") for line in lines if line.startswith("murmurate: ")]
    causes = [message.removeprefix("failed: ") for message in messages if not message.startswith("warning: ")]
    return (causes or lines or [""])[-1]
