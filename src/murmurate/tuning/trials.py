"""The trials of a study on disk, which several processes may share, and continue after one was killed.

``study.db`` (SQLite) has every trial's parameters and values. The process that trains a trial holds a lock
(flock) of the trial's file in ``locks/``, which the kernel frees when the process ends, however it ends: a
running trial whose lock is free was cut off, and the process that finds it continues its run.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from murmurate.errors import MissingExtra, Refusal, RunFailed
from murmurate.tuning.space import Dimension, combinations

GRID = "grid"
SAMPLERS = ("tpe", "random", "qmc", "cmaes", "gp", GRID)
PRUNERS = ("median", "halving", "hyperband", "none")


@dataclass
class HeldTrial:
    """A trial that this process trains. lock: descriptor of the file whose lock it holds. reported: steps
    whose values Optuna knows."""

    trial: Any
    lock: int
    reported: set[int] = field(default_factory=set)

    @property
    def number(self) -> int:
        return int(self.trial.number)

    def release(self) -> None:
        os.close(self.lock)


class Trials:
    """The study in ``folder``, created if it does not exist. With the sampler ``grid`` its trials are the
    ``combinations`` of ``space``, in their order.

    Raises MissingExtra without Optuna, Refusal for an unknown pruner or a damaged database; ``next`` raises
    Refusal for an unknown sampler (see ``check_installed``).
    """

    def __init__(
        self, folder: Path, space: Sequence[Dimension], direction: str, sampler: str, pruner: str, seed: int
    ) -> None:
        self._folder, self._space, self._sampler, self._seed = folder, space, sampler, seed
        (folder / "locks").mkdir(exist_ok=True)
        try:
            with self._locked():
                self.study = _opened(folder / "study.db", direction)
        except Refusal:
            raise
        except Exception as error:  # an exception of SQLite, SQLAlchemy or Optuna
            raise Refusal(
                f"{folder / 'study.db'} cannot be opened ({type(error).__name__}). Choose another with --out."
            ) from error
        self.study.pruner = _pruner(pruner)

    def all(self) -> list[Any]:
        trials: list[Any] = self.study.get_trials(deepcopy=False)
        return trials

    def best(self) -> Any:
        """The best finished trial; None if none has finished."""
        try:
            return self.study.best_trial
        except ValueError:
            return None

    def values(self) -> list[float]:
        """The values of the finished trials."""
        return [float(trial.value) for trial in self.all() if trial.state.name == "COMPLETE"]

    def next(self, most: int) -> HeldTrial | None:
        """A trial that was cut off; else a new one, unless there are ``most`` already, or all of a grid;
        else None.

        Raises Refusal if another process holds the lock of a new trial: ``locks/`` is another study's.
        """
        optuna = _optuna()
        with self._locked():
            trials = self.all()
            for frozen in trials:
                if frozen.state.name != "RUNNING" or (lock := self._lock(frozen.number)) is None:
                    continue
                trial = optuna.trial.Trial(self.study, frozen._trial_id)
                if frozen.params.keys() == {dimension.name for dimension in self._space}:
                    return HeldTrial(trial, lock, set(frozen.intermediate_values))
                self.study.tell(
                    trial, state=optuna.trial.TrialState.FAIL
                )  # cut off while its parameters were drawn
                os.close(lock)
            # a trial that was cut off while its parameters were drawn lacks some, and does not count
            if sum(len(trial.params) == len(self._space) for trial in trials) >= most:
                return None
            if self._sampler == GRID and not self._enqueued(trials):
                return None
            # seeded by the trial's number: else processes that share the study would draw the same; samplers
            # take seeds of 32 bits, and a run takes longer ones
            self.study.sampler = _sampler(self._sampler, (self._seed + len(trials)) % 2**32)
            trial = self.study.ask({dimension.name: dimension.distribution() for dimension in self._space})
            lock = self._lock(trial.number)
            if lock is None:
                raise Refusal(f"{self._folder / 'locks'} belongs to another study. Choose another --out.")
            return HeldTrial(trial, lock)

    def _enqueued(self, trials: Sequence[Any]) -> bool:
        """Make the first combination of the grid that no trial has the next one that the study asks for;
        returns False if there is none.

        Optuna's own sampler of grids ends a study that is being optimized, and this one is asked instead.
        """
        if any(trial.state.name == "WAITING" for trial in trials):
            return True  # a process was killed before it asked for it
        tried = [trial.params for trial in trials]
        untried = next((each for each in combinations(self._space) if each not in tried), None)
        if untried is not None:
            self.study.enqueue_trial(untried)
        return untried is not None

    def completed(self, held: HeldTrial, value: float) -> None:
        self.study.tell(held.trial, value)

    def pruned(self, held: HeldTrial) -> None:
        self.study.tell(held.trial, state=_optuna().trial.TrialState.PRUNED)

    def failed(self, held: HeldTrial, why: str) -> None:
        held.trial.set_user_attr("error", why)
        self.study.tell(held.trial, state=_optuna().trial.TrialState.FAIL)

    def renew(self, direction: str) -> bool:
        """Replace ``study.db`` by one of another objective, which has the same trials without their values;
        it must be opened anew. Returns False, with nothing changed, if a trial has finished or was pruned,
        or another process trains one."""
        optuna, path = _optuna(), self._folder / "study-renewed.db"
        with self._locked(), contextlib.ExitStack() as held:
            trials = self.all()
            for trial in trials:
                if trial.state.name in ("COMPLETE", "PRUNED"):
                    return False
                if trial.state.name == "RUNNING":
                    if (lock := self._lock(trial.number)) is None:
                        return False
                    held.callback(os.close, lock)
            path.unlink(missing_ok=True)
            renewed = _opened(path, direction)
            for trial in trials:
                if trial.state.name == "WAITING":  # of a grid, whose combination is still to be tried
                    continue
                same = {"state": trial.state, "params": trial.params, "distributions": trial.distributions}
                renewed.add_trial(optuna.trial.create_trial(**same, user_attrs=trial.user_attrs))
            for study in (renewed, self.study):
                study._storage.remove_session()
                study._storage._backend.engine.dispose()
            path.replace(self._folder / "study.db")
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._folder / "locks" / "study", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, number: int) -> int | None:
        """The descriptor of a trial's locked file; None if another process holds the lock."""
        path = self._folder / "locks" / f"trial-{number}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor


def _opened(path: Path, direction: str) -> Any:
    """The study of the database ``path``, created if it does not exist."""
    optuna = _optuna()
    from sqlalchemy.pool import QueuePool

    # the path is no part of the URL, where "?", "%" and "{" in it would have a meaning
    connect = functools.partial(sqlite3.connect, path.absolute(), timeout=60, check_same_thread=False)
    storage = optuna.storages.RDBStorage(
        "sqlite://", engine_kwargs={"creator": connect, "poolclass": QueuePool}
    )
    return optuna.create_study(storage=storage, study_name="study", direction=direction, load_if_exists=True)


@contextlib.contextmanager
def database_errors(folder: Path) -> Iterator[None]:
    """Raises RunFailed for an exception of the study's database in ``folder``: on a full disk, say."""
    optuna = _optuna()
    from sqlalchemy.exc import SQLAlchemyError  # which Optuna needs

    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise RunFailed(
            f"{folder / 'study.db'} cannot be used: {cause}. Make room, and see that it can be written; the "
            "same command then goes on with the study."
        ) from error


def check_installed(sampler: str, pruner: str) -> None:
    """Raises MissingExtra without Optuna, Refusal for an unknown sampler or pruner, or if the sampler needs
    a package that is not installed."""
    _sampler(sampler, 0)
    _pruner(pruner)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise MissingExtra("optuna", "tune", "murmurate tune") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _sampler(name: str, seed: int) -> Any:
    samplers = _optuna().samplers
    try:
        if name == "tpe":
            return samplers.TPESampler(seed=seed)
        if name in ("random", GRID):  # of a grid all values are given
            return samplers.RandomSampler(seed=seed)
        if name == "qmc":
            # one seed for all processes, which draw from one sequence
            return samplers.QMCSampler(seed=0, warn_asynchronous_seeding=False)
        if name == "cmaes":
            importlib.import_module("cmaes")  # which Optuna imports only at the second trial
            return samplers.CmaEsSampler(seed=seed)
        if name == "gp":
            return samplers.GPSampler(seed=seed)
    except ImportError as error:
        raise Refusal(f"The sampler {name} needs another package ({error}). Use --sampler tpe.") from error
    raise Refusal(f"There is no sampler called '{name}'. Choose one of: {', '.join(SAMPLERS)}.")


def _pruner(name: str) -> Any:
    pruners = _optuna().pruners
    if name == "median":
        return pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=3)  # steps are tenths of the budget
    if name == "halving":
        return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    if name == "hyperband":
        return pruners.HyperbandPruner(min_resource=1, max_resource=10, reduction_factor=3)
    if name == "none":
        return pruners.NopPruner()
    raise Refusal(f"There is no pruner called '{name}'. Choose one of: {', '.join(PRUNERS)}.")
