"""``murmurate.simulate``: a simulated run from Python, with callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import murmurate
from callbacks import Seen
from murmurate.record.reader import read_metrics

SMALL: dict[str, Any] = {"replicas": 4, "simulators": 1, "eval_episodes": 1, "quiet": True}


def test_callbacks_get_every_record_of_a_simulated_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Seen()
    result = murmurate.simulate(
        "cartpole-a2c",
        strategy="gala",
        updates=20,
        agent={"hidden": 8},
        cluster={"compute": "straggler:0.01,4", "crash_every_seconds": 0.1},
        out=tmp_path / "run",
        callbacks=[seen],
        **SMALL,
    )
    assert capsys.readouterr() == ("", "")
    assert (result.code, result.folder, result.summary["exit"]) == (0, tmp_path / "run", "finished")
    assert result.summary["virtual_seconds"] >= 0.2
    # the recipe's 500,000 env steps do not end a run whose updates are given; the straggler makes fewer
    assert max(record["updates"] for record in seen.records) == 20
    assert [*seen.records, *seen.events] == sorted(
        read_metrics(tmp_path / "run" / "metrics.jsonl"), key=lambda record: record.get("kind") == "event"
    )
    assert any(event["event"] == "died" for event in seen.events)
    assert seen.checkpoints == [tmp_path / "run" / "checkpoints" / "last"]
    assert seen.results == [result]
    assert murmurate.load(result.folder).run.replicas == 4


@pytest.mark.parametrize("strategy", ["gala", "all-reduce"])
def test_a_callback_stops_a_simulated_run(tmp_path: Path, strategy: str) -> None:
    class Enough(murmurate.Callback):
        def on_record(self, record: Mapping[str, Any]) -> Any:
            return murmurate.STOP if record["updates"] >= 10 else None

    result = murmurate.simulate(
        "cartpole-a2c",
        strategy=strategy,
        updates=2_000,
        cluster=murmurate.Cluster(lines=400),
        out=tmp_path / "run",
        callbacks=[Enough()],
        **SMALL,
    )
    assert result.summary["stopped_because"] == "the callback Enough.on_record stopped the run"
    assert 10 <= result.summary["updates"] < 100
    assert result.summary["exit"] == "finished"


def test_a_callback_that_raises_ends_the_run_and_the_checkpoint_is_kept(tmp_path: Path) -> None:
    class Broken(murmurate.Callback):
        def on_record(self, record: Mapping[str, Any]) -> None:
            raise KeyError("missing")

    with pytest.raises(murmurate.RunFailed, match=r"on_record raised KeyError.*murmurate eval") as caught:
        murmurate.simulate("cartpole-a2c", updates=200, out=tmp_path / "run", callbacks=[Broken()], **SMALL)
    assert isinstance(caught.value.__cause__, KeyError)
    assert murmurate.load(tmp_path / "run").evaluate(episodes=1)["eval_return_mean"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cluster": {"crash_every_second": 3}}, "crash_every_seconds"),
        ({"cluster": {"loss": 2.0}}, "loss"),
        ({"cluster": {"compute": "gamma:1"}}, "no model 'gamma'"),
        ({"launcher": "ray"}, "leave out --launcher"),
        ({"loggers": ("mlflow",)}, "leave out --loggers"),
        ({"cluster": 3}, "cluster is 3"),
    ],
)
def test_what_a_simulation_has_not_is_refused(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(murmurate.Refusal, match=words):
        murmurate.simulate("cartpole-a2c", out=tmp_path / "run", updates=5, **SMALL, **arguments)
    assert not (tmp_path / "run").exists()
