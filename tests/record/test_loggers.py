"""Weights & Biases and MLflow, with the packages themselves and without a network."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import murmurate
from murmurate.record.loggers import check_loggers, group_and_name, open_loggers

RECORD: dict[str, Any] = {
    "time_seconds": 1.5, "env_steps": 160, "total_env_steps": 640, "updates": 10, "replica": 1, "loss": 0.5,
    "entropy": None, "not_finite": ["entropy"], "episode_returns": [[9.0, 9], [11.0, 11]],
}  # fmt: skip
EVALUATION = {"time_seconds": 1.75, "env_steps": 640, "kind": "evaluation", "eval_return_mean": 12.0}
CONFIG = {"recipe": "cartpole-a2c", "agent": {"name": "a2c", "learning_rate": 1e-3}, "loggers": ["mlflow"]}


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(murmurate.MissingExtra, match=r"pip install 'murmurate\[wandb\]'"):
        check_loggers(["wandb"])


def test_a_logger_that_cannot_start_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from murmurate.record import loggers

    def raises(*_: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(loggers, "MLflow", raises)
    with pytest.raises(murmurate.Refusal, match=r"no route to host.*MLFLOW_TRACKING_URI"):
        open_loggers(["mlflow"], tmp_path, CONFIG)


def test_loggers_that_had_started_are_ended_if_another_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from murmurate.record import loggers

    codes: list[int] = []

    class Started(murmurate.Callback):
        def __init__(self, *_: object) -> None:
            pass

        def on_end(self, result: murmurate.Result) -> None:
            codes.append(result.code)
            raise OSError("the server is gone")

    def raises(*_: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(loggers, "MLflow", Started)
    monkeypatch.setattr(loggers, "WeightsAndBiases", raises)
    with pytest.raises(murmurate.Refusal, match="the logger wandb cannot start"):
        open_loggers(["mlflow", "wandb"], tmp_path, CONFIG)
    assert codes == [1]


@pytest.mark.parametrize("file", ["sweep.json", "study.json"])
def test_runs_of_a_sweep_are_one_group_and_their_names_are_their_own(file: str, tmp_path: Path) -> None:
    for name in ("ppo", "sac"):
        (tmp_path / name / "seed-0").mkdir(parents=True)
    (tmp_path / "ppo" / file).write_text("{}")
    assert group_and_name(tmp_path / "ppo" / "seed-0") == ("ppo", "ppo/seed-0")
    assert group_and_name(tmp_path / "sac" / "seed-0") == ("seed-0", "seed-0")


class _Init:
    """Stands for the module wandb, which keeps what a run was begun with."""

    Settings = dict

    def init(self, **arguments: Any) -> _Init:
        self.arguments = arguments
        return self

    def define_metric(self, *_: object, **__: object) -> None:
        pass


def test_variables_of_weights_and_biases_go_before_names_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: Any = _Init()
    monkeypatch.setitem(sys.modules, "wandb", begun)
    for name in ("WANDB_RUN_GROUP", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    (folder := tmp_path / "ppo" / "seed-0").mkdir(parents=True)
    (tmp_path / "ppo" / "sweep.json").write_text("{}")
    open_loggers(["wandb"], folder, CONFIG)
    assert (begun.arguments["group"], begun.arguments["name"]) == ("ppo", "ppo/seed-0")
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    monkeypatch.setenv("WANDB_NAME", "first")
    open_loggers(["wandb"], folder, CONFIG)
    assert (begun.arguments["group"], begun.arguments["name"]) == ("mine", "first")


def test_a_resumed_run_is_the_same_run_of_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(variable, raising=False)
    identities = []
    for name in ("first", "second", "first"):
        begun: Any = _Init()
        monkeypatch.setitem(sys.modules, "wandb", begun)
        (tmp_path / name).mkdir(exist_ok=True)
        open_loggers(["wandb"], tmp_path / name, CONFIG)
        assert begun.arguments["resume"] == "allow"
        identities.append(begun.arguments["id"])
    first, second, again = identities
    assert first == again != second
    for variable, value in (("WANDB_RUN_ID", "mine"), ("WANDB_MODE", "offline")):
        with monkeypatch.context() as chosen:
            chosen.setenv(variable, value)
            open_loggers(["wandb"], tmp_path / "first", CONFIG)
        assert not {"id", "resume"} & set(begun.arguments), "arguments would take precedence"


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own store of runs, in a file, with the experiment birds."""
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "birds")


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_store")
def test_mlflow_has_the_numbers_the_settings_and_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    folder.mkdir()
    (logger,) = open_loggers(["mlflow", "mlflow"], folder, CONFIG)
    logger.on_record(RECORD)
    logger.on_evaluation(EVALUATION)
    logger.on_end(murmurate.Result(folder, {"env_steps": 700, "eval_return_mean": 13.0, "exit": "finished"}))
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("birds").experiment_id])
    assert run.info.run_name == "my-run"
    assert run.info.status == "FINISHED"
    assert run.data.params["agent.learning_rate"] == "0.001"
    assert run.data.tags["folder"] == str(folder)
    assert run.data.metrics["replica-1/learning/loss"] == 0.5
    assert run.data.metrics["replica-1/return/episode_return"] == 10.0
    assert run.data.metrics["evaluation/eval_return_mean"] == 12.0
    assert run.data.metrics["summary/eval_return_mean"] == 13.0
    (point,) = client.get_metric_history(run.info.run_id, "replica-1/learning/loss")
    assert point.step == 640


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_store")
def test_a_run_of_mlflow_whose_first_write_fails_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    def raises(*_: object, **__: object) -> None:
        raise OSError("the server is gone")

    with monkeypatch.context() as broken:
        broken.setattr(MlflowClient, "log_batch", raises)
        with pytest.raises(murmurate.Refusal, match="the server is gone"):
            open_loggers(["mlflow"], tmp_path, CONFIG)
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("birds").experiment_id])
    assert run.info.status == "FAILED"


@pytest.mark.slow
def test_weights_and_biases_offline_writes_what_a_run_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read back from the file that ``wandb sync`` would send."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    result = murmurate.train(
        "cartpole-a2c", updates=40, launcher="inline", out=tmp_path / "my-run", quiet=True, eval_episodes=1,
        loggers=["wandb"], agent={"learning_rate": 2e-3},
    )  # fmt: skip
    assert result.code == 0
    (written,) = (tmp_path / "my-run").glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    for name in (b"replica-0/learning/loss", b"my-run", b"learning_rate", b"env_steps", b"eval_return_mean"):
        assert name in content, name
