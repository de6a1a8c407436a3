"""``murmurate.train`` and ``resume``: fields, refusals, callbacks, the end."""

from __future__ import annotations

import dataclasses
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

import murmurate
from callbacks import Seen
from murmurate import plugins
from murmurate.agents.ppo import PPO
from murmurate.api.runs import configured
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.gala import GALA
from murmurate.training.run_folder import claim_new, new_folder

SHORT: dict[str, Any] = {"launcher": "inline", "simulators": 2, "eval_episodes": 1, "quiet": True}


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


def test_a_learner_or_part_of_another_class_is_refused(tmp_path: Path) -> None:
    """Its folder could not be read again, as ``run.json`` is read as what the recipe has."""
    with pytest.raises(murmurate.Refusal, match="agent is a PPO, and this recipe has a A2C"):
        murmurate.train("cartpole-a2c", agent=PPO(), out=tmp_path / "run", **SHORT)
    with pytest.raises(murmurate.Refusal, match="world is a PPO"):
        murmurate.train("cartpole-a2c", world=PPO(), out=tmp_path / "run", **SHORT)  # type: ignore[arg-type]
    other = dataclasses.replace(murmurate.recipe("cartpole-a2c"), learner=PPO())
    with pytest.raises(murmurate.Refusal, match="the learner is a PPO, and the recipe cartpole-a2c"):
        murmurate.train(other, out=tmp_path / "run", **SHORT)
    assert not (tmp_path / "run").exists()


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


class _Misspelt(murmurate.Callback):
    def on_records(self, record: object) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"recipe": "cartpole-a2x"}, "Did you mean 'cartpole-a2c'"),
        ({"recipe": None}, "say what to train"),
        ({"env": "gym:CartPole-v1"}, "say what to train"),
        ({"algorithm": "a2c"}, "leave out env and algorithm"),
        ({"recipe": 3}, "takes a name"),
        ({"recipe": _Misspelt}, "An environment is given as env="),
        ({"env": "CartPole-v1", "algorithm": "A2C"}, "no algorithm called 'A2C'. Did you mean 'a2c'?"),
        ({"strategy": "GALA"}, "Did you mean 'gala'"),
        ({"strategy": "DDP"}, "Did you mean 'all-reduce'"),
        ({"agent": {"learning_rte": 1.0}}, "agent has no field 'learning_rte'. Did you mean 'learning_rate'"),
        ({"learning_rate": 1.0}, "Did you mean agent={'learning_rate': ...}"),
        ({"agent": {"learning_rate": "fast"}}, "agent.learning_rate is 'fast'; it must be float"),
        ({"network": "x.py:Net"}, "Did you mean agent={'network': ...}?"),
        (
            {"recipe": "pendulum-mbpo", "hidden": 8},
            "Did you mean agent={'policy': {'hidden': ...}} or agent={'model': {'hidden': ...}}?",
        ),
        (
            {"recipe": "pendulum-mbpo", "agent": {"elite": 2}},
            "agent has no field 'elite'. Did you mean 'model': {'elites': ...}?",
        ),
        ({"agent": {"torso": "mpl"}}, "did you mean 'mlp'"),
        ({"agent": {"network": _Misspelt}}, 'Give its name: "FILE.py:_Misspelt", or "module:_Misspelt"'),
        ({"agent": 3}, "takes a mapping"),
        ({"replicas": "4"}, "replicas is '4'; it must be int"),
        ({"env_steps": 2e3}, "env_steps is 2000.0; it must be int or None. Write 2000."),
        ({"replicas": True}, "it must be int"),
        (
            {"loggers": "wandb"},
            "loggers is 'wandb'; it must be tuple[Literal['wandb', 'mlflow'], ...]. Write ['wandb'].",
        ),
        ({"replicas": 0}, "replicas is 0; it must be from 1"),
        ({"parts": ()}, "parts is (): give the parts along rows and columns"),
        ({"simulater": 2}, "Did you mean 'simulators'"),
        ({"n_envs": 2}, "Did you mean 'simulators'"),
        ({"agent": {"gamma": 0.9}}, "agent has no field 'gamma'. Did you mean 'discount'"),
        ({"world": {"kwargs": {}}}, "--env FILE.py:NAME, or env=FUNCTION"),
        ({"env_kwargs": {}}, "--env FILE.py:NAME, or env=FUNCTION"),
        ({"strategy": "galla"}, "Did you mean 'gala'"),
        ({"strategy": {"name": "gala", "staleness": 3}}, "Did you mean 'staleness_bound'"),
        (
            {"strategy": {"bound": 2}},
            "It has none. Choose another strategy by its name, as in strategy=",
        ),
        ({"strategy": 3}, "takes a name"),
        ({"launcher": "inlin"}, "Did you mean 'inline'"),
        ({"world": {"id": "Acrobot-v1"}}, "world has no field 'id'"),
        ({"callbacks": [Seen]}, "callbacks=[Seen()]"),
        ({"callbacks": _Misspelt()}, "callbacks is a _Misspelt: pass a list, as in callbacks=[...]"),
        ({"callbacks": [object()]}, "object is no callback"),
        ({"callbacks": [_Misspelt()]}, "Did you mean on_record"),
        ({"loggers": ["wandbb"]}, "loggers is ['wandbb']"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_made(
    arguments: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    given = {"recipe": "cartpole-a2c", "out": tmp_path / "run", **arguments}
    if "env" in given:
        del given["recipe"]
    with pytest.raises(murmurate.Refusal) as refusal:
        murmurate.train(**given)
    assert sentence in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("recipe", "option", "sentence"),
    [
        ("pendulum-sac", "--replay.n-step", "Did you mean --agent.n-step? "),
        ("pendulum-sac", "--gradient-steps", "Did you mean --replay.samples-per-insert? "),
        ("cartpole-trpo", "--learning-rate", "Did you mean --agent.value-learning-rate? "),
        ("pendulum-mbpo", "--train-freq", "Did you mean --updates-per-step? "),
        ("pendulum-mbpo", "--agent.batch", "Did you mean --agent.policy.batch or --agent.model.batch? "),
        ("pendulum-mbpo", "--agent.model.hiden", "Did you mean --agent.model.hidden? "),
        ("pendulum-td3", "--agent.scale-rewards", ""),
        ("pendulum-mbpo", "--agent.normalize-observations", ""),
        ("pendulum-sac", "--world.gravity", "An environment that takes arguments is made by a function"),
        ("pong-dqn", "--world.gravity", ""),
    ],
)
def test_hints_name_what_is_meant_or_nothing(recipe: str, option: str, sentence: str) -> None:
    from murmurate.cli.options import change

    with pytest.raises(murmurate.Refusal) as refusal:
        change(murmurate.recipe(recipe), [option, "3"], "murmurate train")
    assert str(refusal.value).startswith(f"There is no field called '{option[2:]}'. {sentence or 'See:'}")


def test_only_fields_that_are_taken_are_listed() -> None:
    with pytest.raises(murmurate.Refusal) as refusal:
        murmurate.train("corpus-lda", nosuch=3)
    listed = str(refusal.value).partition("It has ")[2].rstrip(".").split(", ")
    assert {"agent", "env_steps", "strategy", "world"} <= set(listed)
    assert not {"path", "topics"} & set(listed), "they are fields of the world and of the agent"


def test_every_option_of_the_command_line_is_reachable() -> None:
    from murmurate.cli.options import options

    run = murmurate.recipe("cartpole-apex-dqn")
    for option in options(run):
        value: Any = option.value
        for name in reversed(option.name.replace("-", "_").split(".")):
            value = {name: value}
        assert configured(run, value) == run, option.name


def test_numpy_numbers_lists_and_objects_are_taken() -> None:
    import numpy as np

    run = murmurate.recipe("cartpole-a2c")
    agent = dataclasses.replace(run.learner, discount=0.9)  # type: ignore[type-var]
    changed = configured(
        run, {"replicas": np.int64(3), "agent": agent, "placement": {"devices": ["cpu", "cpu"]}}
    )
    assert (changed.replicas, type(changed.replicas)) == (3, int)
    assert changed.learner == agent
    assert changed.placement.devices == ("cpu", "cpu")


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


def test_a_rank_of_torchrun_starts_no_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = murmurate.train("cartpole-a2c", updates=2, out=tmp_path / "first", **SHORT)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = r"torchrun started this program 2 times.*\(in Python: launcher='torchrun'\)"
    with pytest.raises(murmurate.Refusal, match=words):
        murmurate.train("cartpole-a2c", updates=2, out=tmp_path / "run", **SHORT)
    with pytest.raises(murmurate.Refusal, match=words):
        murmurate.resume(first.folder, updates=4, quiet=True)
    assert list(tmp_path.iterdir()) == [first.folder]


def test_a_script_without_a_guard_is_refused_with_the_remedy(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import murmurate\nmurmurate.train('cartpole-a2c', updates=2, out='run')\n")
    ended = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "Refusal: each process imports the script" in ended.stderr
    assert "if __name__ == '__main__':" in ended.stderr
    assert not (tmp_path / "run").exists()
