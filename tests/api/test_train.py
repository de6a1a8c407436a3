"""``murmurate.train`` and ``resume``: callbacks, folders, the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import pytest
from short_trainings import SHORT

import murmurate
from callbacks import Seen
from murmurate import plugins
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.gala import GALA
from murmurate.training.run_folder import claim_new, new_folder


def test_a_run_its_callbacks_and_its_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class WithoutSummary(Seen):
        def on_record(self, record: Mapping[str, Any]) -> None:
            super().on_record(record)
            assert not (tmp_path / "run" / "summary.json").exists(), "it is of the end before the resume"

    first, second = Seen(), WithoutSummary()
    result = murmurate.train(
        "cartpole-a2c",
        strategy={"name": "gala", "staleness_bound": 3},
        replicas=2,
        updates=30,
        seed=5,
        agent={"learning_rate": 1e-3, "hidden": 8},
        out=tmp_path / "run",
        callbacks=[first],
        **SHORT,
    )
    assert capsys.readouterr().out == ""
    assert (result.code, result.folder) == (0, tmp_path / "run")
    assert result.summary["updates"] == 30
    assert {record["replica"] for record in first.records} == {0, 1}
    assert first.checkpoints == [tmp_path / "run" / "checkpoints" / "last"]
    assert "checkpoint" in [event["event"] for event in first.events]
    assert first.results == [result]
    again = murmurate.resume(tmp_path / "run", updates=60, callbacks=[second], quiet=True)
    assert again.summary["updates"] == 60
    # none of the records from before the resume
    assert min(record["updates"] for record in second.records) > 30
    run = murmurate.load(tmp_path / "run").run
    assert isinstance(run.strategy, GALA)
    assert (run.strategy.staleness_bound, run.seed, run.replicas) == (3, 5, 2)
    assert (run.learner.learning_rate, run.learner.hidden) == (1e-3, 8)  # type: ignore[attr-defined]


class _Wandering(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Its episodes begin in another working folder."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def reset(self, **options: Any) -> Any:
        os.chdir("/")
        return super().reset(**options)


def test_an_environment_may_change_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = murmurate.train(env=_Wandering, algorithm="a2c", updates=2, out="run", **SHORT)
    assert (result.folder, result.summary["exit"]) == (tmp_path / "run", "finished")
    assert Path.cwd() == Path("/")
    assert murmurate.resume(result.folder, updates=4, quiet=True).summary["updates"] == 4


def test_a_callback_stops_a_run(tmp_path: Path) -> None:
    class Enough(murmurate.Callback):
        def on_record(self, record: Mapping[str, Any]) -> Any:
            return murmurate.STOP

    result = murmurate.train(
        "cartpole-a2c", updates=1_000_000, out=tmp_path / "run", callbacks=[Enough()], **SHORT
    )
    assert result.code == 0
    assert result.summary["exit"] == "finished"
    assert result.summary["stopped_because"] == "the callback Enough.on_record stopped the run"
    assert result.summary["updates"] < 1_000_000


def test_a_run_that_ends_before_its_first_update_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = SHORT | {"quiet": False, "env_steps": None, "minutes": 1e-6}
    result = murmurate.train("cartpole-dqn", out=tmp_path / "run", **options)
    assert (result.code, result.summary["updates"]) == (0, 0)
    assert "It ended before the first update: make the run longer." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "error", "words"),
    [
        ("on_record", KeyError("mine"), "KeyError: 'mine'"),
        ("on_checkpoint", KeyError("mine"), "KeyError: 'mine'"),
        ("on_end", KeyError("mine"), "KeyError: 'mine'"),
        ("on_record", SystemExit(3), "SystemExit: 3"),
    ],
)
def test_a_callback_that_fails_ends_the_run_and_keeps_the_checkpoint(
    method: str, error: BaseException, words: str, tmp_path: Path
) -> None:
    def fail(argument: object) -> None:
        raise error

    callback = type("Broken", (), {method: staticmethod(fail)})()
    with pytest.raises(murmurate.RunFailed, match=rf"Broken\.{method} raised {words}") as failure:
        murmurate.train("cartpole-a2c", updates=40, out=tmp_path / "run", callbacks=[callback], **SHORT)
    assert failure.value.__cause__ is error
    assert murmurate.load(tmp_path / "run").act([0.0] * 4) in (0, 1)


class _Renamed(AllReduce):
    name: ClassVar[str] = "renamed"


class _SameName(AllReduce):
    pass


def test_a_strategy_of_the_script_is_found_again_or_its_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {**SHORT, "updates": 2, "out": tmp_path / "run"}
    with pytest.raises(murmurate.Refusal, match="two strategies are called 'all-reduce'"):
        murmurate.train("cartpole-a2c", strategy=_SameName(), **short)
    assert not (tmp_path / "run").exists()
    with pytest.warns(UserWarning, match="Set MURMURATE_IMPORT to the file that defines _Renamed"):
        murmurate.train("cartpole-a2c", strategy=_Renamed(), **short)
    with pytest.raises(murmurate.Refusal, match=r"strategy 'renamed', which .* --import FILE.py"):
        murmurate.load(tmp_path / "run")
    (tmp_path / "their_strategy.py").write_text(
        "from murmurate.strategies.all_reduce import AllReduce\n"
        "class Renamed(AllReduce):\n    name = 'renamed'\n"
    )
    monkeypatch.setenv(plugins.IMPORTS, str(tmp_path / "their_strategy.py"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    plugins.modules.cache_clear()
    try:
        assert murmurate.load(tmp_path / "run").run.strategy.name == "renamed"
    finally:
        monkeypatch.setenv(plugins.IMPORTS, "")
        plugins.modules.cache_clear()


def test_folders_of_runs_in_one_second_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    first = new_folder("gym:my/Env-a2c")
    assert first == Path("runs/gym-my-Env-a2c-20260101-000000")
    first.mkdir(parents=True)
    assert new_folder("gym:my/Env-a2c") == Path("runs/gym-my-Env-a2c-20260101-000000-2")


def test_runs_that_begin_at_once_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    begin = threading.Barrier(8)
    folders: list[Path] = []

    def start() -> None:
        begin.wait()
        folders.append(claim_new("cartpole-a2c"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in folders) == sorted(path.name for path in Path("runs").iterdir())
    assert len(set(folders)) == 8


_SCRIPT = """
    import murmurate

    def go():
        try:
            murmurate.train("cartpole-a2c", minutes=5, out="run", callbacks=[Ready()])
        except KeyboardInterrupt as interrupt:
            print("interrupted:", interrupt)

    class Ready(murmurate.Callback):
        def on_record(self, record):
            print("ready", flush=True)
    {call}
"""


@pytest.mark.slow
def test_ctrl_c_in_a_script_saves_and_raises(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT.format(call='\n    if __name__ == "__main__":\n        go()')))
    with subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
    assert process.returncode == 0
    assert f"interrupted: the run is saved; go on with murmurate.resume('{tmp_path / 'run'}')" in rest
    assert (tmp_path / "run" / "checkpoints" / "last" / "state.json").exists()


def test_ctrl_c_twice_before_a_checkpoint_says_that_nothing_is_saved(tmp_path: Path) -> None:
    class Impatient(murmurate.Callback):
        def on_record(self, record: Mapping[str, Any]) -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=r"^No checkpoint had been saved"):
        murmurate.train(
            "cartpole-a2c",
            updates=1_000,
            out=tmp_path / "run",
            callbacks=[Impatient()],
            record_every_seconds=1e-9,
            **SHORT,
        )
