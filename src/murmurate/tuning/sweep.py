"""A sweep: one recipe trained with several seeds into one folder, and a report of all its runs."""

from __future__ import annotations

import dataclasses
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, RunFailed
from murmurate.record import score_statistics
from murmurate.record.figures import number_text
from murmurate.record.report import report
from murmurate.record.stored import UNSOUND, read_object
from murmurate.record.sweeps import FILE, seed_folders
from murmurate.training import own_files
from murmurate.training.run import Run
from murmurate.training.run_folder import plain, set_aside
from murmurate.tuning import run_process
from murmurate.tuning.run_process import HeldRun, Running, RunProcess

FAILED, REFUSED = 1, 2
MOST_SEEDS = 10_000


@dataclass
class Sweep:
    """The runs of one recipe with several seeds.

    run: the run to train; its own seed is not used. words: ``train`` and its arguments, without the seed and
    the folder. folder: holds ``sweep.json``, a run folder ``seed-<k>`` for each seed, and ``report.html``.
    jobs: number of runs at once. If it is more than one, the output of each is in ``seed-<k>.log``. codes: by
    seed, the exit codes of the runs that have ended.
    """

    run: Run
    words: Sequence[str]
    seeds: Sequence[int]
    folder: Path
    jobs: int = 1
    say: Callable[[str], None] = print
    codes: dict[int, int] = field(default_factory=dict, init=False)

    def train(self) -> int:
        """Train every seed that has not finished, resuming those that were interrupted; then write the report
        of these and of the folder's other finished seeds, and print the statistics. Returns the exit code.

        Raises Refusal, with nothing changed, where the folder holds anything but this sweep; RunFailed where
        the report cannot be made.
        """
        self._claim()
        paths = {seed: self.folder / f"seed-{seed}" for seed in self.seeds}
        finished = [seed for seed, path in paths.items() if run_process.has_finished(path)]
        if finished:
            self.say(f"finished before: {_seeds(finished)}")
        if warning := run_process.changed_files(seed_folders(self.folder).values(), self.run):
            self.say(warning)
        remaining = iter([seed for seed in self.seeds if seed not in finished])

        def start() -> tuple[int, Running] | None:
            seed = next(remaining, None)
            return None if seed is None else (seed, self._start(seed, paths[seed]))

        stopped = run_process.run_all(start, self._ended, self.jobs)
        if stopped:
            ended = [seed for seed, path in paths.items() if run_process.has_finished(path)]
            self.say(
                f"The sweep was stopped with {len(ended)} of {len(self.seeds)} seeds finished. "
                f"Go on with: {self.command}"
            )
            return 128 + stopped
        self._conclude()
        if not any(self.codes.values()):
            return 0
        return REFUSED if all(code == REFUSED for code in self.codes.values()) else FAILED

    @property
    def command(self) -> str:
        """The command that begins or continues this sweep."""
        jobs = ["--jobs", str(self.jobs)] if self.jobs > 1 else []
        words = ["murmurate", *self.words, "--seeds", seed_text(self.seeds), *jobs, "--out", str(self.folder)]
        return shlex.join(words)

    def _claim(self) -> None:
        """Write ``sweep.json``. Raises Refusal if the folder holds anything but a sweep of this run."""
        settings = plain(dataclasses.replace(self.run, seed=0))
        path, seeds = self.folder / FILE, set(self.seeds)
        if path.exists():
            try:
                stored = read_object(path)
                earlier = run_process.with_younger_fields(stored["settings"], self.run)
                differing = sorted(name for name, value in settings.items() if earlier[name] != value)
            except (OSError, *UNSOUND) as error:
                raise Refusal(f"{path} cannot be read ({error}). Choose another folder: --out.") from error
            if differing:
                raise Refusal(
                    f"{self.folder} holds a sweep with another {', '.join(differing)}. Give the command that "
                    "began it, or choose another folder with --out."
                )
            seeds |= set(seed_folders(self.folder))
        else:
            run_process.check_free(self.folder, "sweep")
        content = {"settings": settings, "seeds": sorted(seeds), "command": self.command}
        run_process.write_settings(self.folder, FILE, content)

    def _start(self, seed: int, folder: Path) -> Running:
        if run_process.is_held(folder):
            self.say(f"seed {seed}: another process trains it in {folder}; waiting for its end")
            return HeldRun(folder)
        if run_process.can_resume(folder):
            words = ["resume", str(folder)]
        else:
            set_aside(folder)
            words = [*self.words, "--seed", str(seed), "--out", str(folder)]
        self.say(f"seed {seed}: murmurate {shlex.join(words)}")
        parallel = self.jobs > 1
        return RunProcess(words, folder.with_suffix(".log") if parallel else None, 1 if parallel else None)

    def _ended(self, seed: int, code: int) -> None:
        self.codes[seed] = code
        if self.jobs > 1 or code:
            output = f"; its output: {self.folder / f'seed-{seed}.log'}" if self.jobs > 1 and code else ""
            ends = {0: "finished", run_process.INTERRUPTED: "interrupted", run_process.TERMINATED: "stopped"}
            self.say(f"seed {seed}: {ends.get(code, f'ended with exit code {code}')}{output}")

    def _conclude(self) -> None:
        """Write the report; print the statistics, and which seeds failed."""
        failed = [seed for seed in self.seeds if self.codes.get(seed)]
        if failed:
            self.say(f"not finished: {_seeds(failed)}. Try these again with: {self.command}")
        paths = seed_folders(self.folder).values()  # those of earlier commands included
        finished = [path for path in paths if run_process.has_finished(path)]
        if finished:
            if changed := own_files.differing(finished):
                self.say(
                    f"warning: {' and '.join(changed)} changed while the seeds were trained, so these may "
                    "differ in more than the seed. Train them anew in another folder: --out."
                )
            self.say(
                scores_line([each for path in finished if (each := run_process.summary(path))], self.run)
            )
            try:
                written = report(finished, self.folder / "report.html")
            except Refusal as refusal:  # its remedies are those of murmurate report
                again = shlex.join(["murmurate", "report", str(self.folder)])
                raise RunFailed(
                    f"The runs are in {self.folder}, and their report could not be made. Try again: {again}. "
                    f"The cause: {refusal}"
                ) from refusal
            self.say(f"The runs are in {self.folder}, their report is {written}")


def scores_line(summaries: Sequence[dict[str, Any]], run: Run) -> str:
    """The statistics of the runs' main figure, in a sentence."""
    curves = (run.evaluation.headline, *run.evaluation.curves)
    name = next((curve.metric for curve in curves if curve is not None), "eval_return_mean")
    scores = [float(value) for summary in summaries if (value := summary.get(name)) is not None]
    if not scores:
        return f"None of the runs has a value of {name}."
    runs = "1 run" if len(scores) == 1 else f"{len(scores)} runs"
    if not score_statistics.available():
        return (
            f"{name} of {runs}: mean {number_text(statistics.fmean(scores))} (for an interquartile mean and "
            "intervals: pip install 'murmurate[topics]')"
        )
    result = score_statistics.summarized(scores)
    mean, iqm = number_text(result.mean), number_text(result.iqm)
    if len(scores) < score_statistics.FEWEST_FOR_INTERVALS:
        return f"{name} of {runs}: mean {mean}, interquartile mean {iqm}"
    return (
        f"{name} of {runs}: mean {mean}{_interval(result.mean_interval)}, interquartile mean {iqm}"
        f"{_interval(result.iqm_interval)}"
    )


def _interval(ends: score_statistics.Interval | None) -> str:
    if ends is None:
        return ""
    return f" (95% bootstrap interval {number_text(ends[0])} to {number_text(ends[1])})"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {seed_text(seeds)}"


def seed_text(seeds: Sequence[int]) -> str:
    """``0-4,7`` for seeds 0, 1, 2, 3, 4 and 7."""
    ranges: list[list[int]] = []
    for seed in sorted(seeds):
        if ranges and seed == ranges[-1][-1] + 1:
            ranges[-1].append(seed)
        else:
            ranges.append([seed])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in ranges)


def read_seeds(text: str) -> list[int]:
    """The seeds of ``0-4`` or ``0,3,7``, ascending. Raises Refusal."""
    seeds: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise Refusal(f"--seeds takes seeds such as 0-4 or 0,3,7, not '{text}'.")
        low, high = int(first), int(last) if dash else int(first)
        if high < low:
            raise Refusal(f"--seeds: {part} is no range of seeds; give the smaller one first, as in 0-4.")
        if high >= 2**63:
            raise Refusal(f"--seeds: {high} is too large; give numbers below 2**63.")
        seeds.update(range(low, min(high + 1, low + MOST_SEEDS + 1)))
        if len(seeds) > MOST_SEEDS:
            raise Refusal(f"--seeds {text} are more than {MOST_SEEDS:,} runs. Give fewer.")
    return sorted(seeds)
