"""What ``murmurate.train`` refuses, its hints, and the fields that it takes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from short_trainings import SHORT

import murmurate
from callbacks import Seen
from murmurate.agents.ppo import PPO
from murmurate.api.runs import configured


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
