"""Loggers of other projects, as callbacks: Weights & Biases and MLflow. (TensorBoard is always written.)"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from murmurate.errors import MissingExtra, Refusal
from murmurate.record import sweeps
from murmurate.record.callbacks import Callback, Result
from murmurate.record.stored import replacing

_PROJECT = "murmurate"
_MOST_METRICS = 1000  # largest number of metrics that MLflow takes in one request
_OF_SEVERAL_RUNS = (sweeps.FILE, "study.json")  # files of the folder around the runs of a sweep or study
# variables by which the user chooses the run of Weights & Biases
_OWN_IDENTITY = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM")
_LONGEST_PARAMETER = 500  # characters of a value that every MLflow server takes


def check_loggers(names: Sequence[str]) -> None:
    """Raise MissingExtra for the first logger whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(name, name, f"The logger {name}")


def open_loggers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Callback]:
    """The loggers called ``names``. config: config of the run, as ``run.json`` has it.

    Raises Refusal for a logger that cannot start; those before it are then ended, as of a failed run.
    """
    loggers: list[Callback] = []
    for name in dict.fromkeys(names):
        try:
            loggers.append({"wandb": WeightsAndBiases, "mlflow": MLflow}[name](folder, config))
        except Exception as problem:
            for opened in loggers:  # their runs would seem to go on for ever
                with contextlib.suppress(Exception):
                    opened.on_end(Result(folder, {}, code=1))
            remedy = {
                "wandb": "Run wandb login, or set WANDB_MODE=offline",
                "mlflow": "Set MLFLOW_TRACKING_URI to a server or a store that can be written",
            }[name]
            raise Refusal(
                f"the logger {name} cannot start ({type(problem).__name__}: {problem}). {remedy}; or leave "
                "it out of --loggers."
            ) from problem
    return loggers


def group_and_name(folder: Path) -> tuple[str, str]:
    """The run's group and its name. For a run of a sweep or study: the name of that one's folder, and
    ``ppo/seed-0``, as other sweeps have a seed-0 too; else the name of the run folder for both."""
    parent = folder.absolute().parent
    if any((parent / file).exists() for file in _OF_SEVERAL_RUNS):
        return parent.name, f"{parent.name}/{folder.name}"
    return folder.name, folder.name


def _kept_identity(folder: Path) -> dict[str, Any]:
    """The arguments of ``wandb.init`` by which each start in ``folder`` goes on with one run.

    Empty if variables choose the run; and offline, as ``wandb sync`` would send each start as the whole run.
    """
    if os.environ.get("WANDB_MODE") == "offline" or any(map(os.environ.get, _OWN_IDENTITY)):
        return {}
    kept = folder / "wandb-run-id"
    identity = kept.read_text().strip() if kept.exists() else ""
    if not identity:
        identity = uuid.uuid4().hex[:8]
        with replacing(kept) as fresh:
            fresh.write_text(f"{identity}\n")
    return {"id": identity, "resume": "allow"}


def _tagged_numbers(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(name, value) of all numbers of a record. A name is ``replica-<i>/<tag>``, with the tag of TensorBoard;
    in a record that belongs to no replica ``run/<tag>``."""
    from murmurate.record.tensorboard import scalars  # slow to import, and not needed without a run

    replica = record.get("replica")
    prefix = "run" if replica is None else f"replica-{replica}"
    return [(f"{prefix}/{tag}", value) for tag, value in scalars(record)]


def _step_of(record: Mapping[str, Any]) -> int:
    """The step of TensorBoard."""
    from murmurate.record.tensorboard import step_of

    return step_of(record)


def _flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested ``config``, named by their path with dots, as in ``agent.discount``."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        path = prefix + name
        flat |= _flattened(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


def _numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """The fields that are numbers."""
    return {
        name: float(value)
        for name, value in summary.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


class WeightsAndBiases(Callback):
    """A run of Weights & Biases, in project ``$WANDB_PROJECT`` (default: murmurate), grouped by sweep or
    study, or else by run folder.

    A resumed run goes on as the same run there, whose id is in the run folder. Files of Weights & Biases are
    in the run folder; its environment variables (``WANDB_MODE=offline``, ``WANDB_RUN_GROUP``, ``WANDB_NAME``,
    ``WANDB_RUN_ID``, say) apply.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        group, name = group_and_name(folder)
        self._run = wandb.init(
            # arguments would take precedence over the variables
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            group=os.environ.get("WANDB_RUN_GROUP", group),
            name=os.environ.get("WANDB_NAME", name),
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),  # the terminal shows our run's progress
            **_kept_identity(folder),
        )
        self._run.define_metric("*", step_metric="env_steps")

    def on_record(self, record: Mapping[str, Any]) -> None:
        counters = {name: record[name] for name in ("updates", "time_seconds") if name in record}
        self._run.log(counters | {"env_steps": _step_of(record)} | dict(_tagged_numbers(record)))

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        counters = {name: record[name] for name in ("env_steps", "time_seconds") if name in record}
        self._run.log(counters | {f"evaluation/{name}": value for name, value in _numbers(record).items()})

    def on_end(self, result: Result) -> None:
        self._run.summary.update(_numbers(result.summary))
        self._run.finish(exit_code=result.code)


class MLflow(Callback):
    """A run of MLflow, in experiment ``$MLFLOW_EXPERIMENT_NAME`` (default: murmurate), stored where
    ``$MLFLOW_TRACKING_URI`` says. A resumed run is another run with the same tag ``folder``, its path."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = client.get_experiment_by_name(name)
        experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
        tags = {"folder": str(folder.absolute())}
        _, run_name = group_and_name(folder)
        self._run_id = client.create_run(experiment_id, run_name=run_name, tags=tags).info.run_id
        values = {key: str(value)[:_LONGEST_PARAMETER] for key, value in _flattened(config).items()}
        parameters = [Param(key, value) for key, value in values.items() if value]
        try:
            for start in range(0, len(parameters), 100):
                client.log_batch(self._run_id, params=parameters[start : start + 100])
        except BaseException:
            with contextlib.suppress(Exception):  # else the run would seem to go on for ever
                client.set_terminated(self._run_id, "FAILED")
            raise

    def on_record(self, record: Mapping[str, Any]) -> None:
        self._log(_tagged_numbers(record), record)

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        self._log([(f"evaluation/{name}", value) for name, value in _numbers(record).items()], record)

    def on_end(self, result: Result) -> None:
        self._log(
            [(f"summary/{name}", value) for name, value in _numbers(result.summary).items()], result.summary
        )
        status = "FINISHED" if result.code == 0 else "FAILED" if result.code == 1 else "KILLED"
        self._client.set_terminated(self._run_id, status)

    def _log(self, values: Sequence[tuple[str, float]], record: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        milliseconds, step = int(time.time() * 1000), _step_of(record)
        metrics = [Metric(name, value, milliseconds, step) for name, value in values]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])
