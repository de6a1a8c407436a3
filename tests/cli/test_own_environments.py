"""``--env`` and ``--algorithm``: what they mean, and how mistakes in them are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from murmurate.cli.main import main
from short_runs import SHORT, refused

FILE = """
from gymnasium.envs.classic_control import CartPoleEnv

def make_env():
    return CartPoleEnv()
"""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--env", "Acrobot-v1"], "--env and --algorithm go together"),
        (["--algorithm", "a2c"], "--env and --algorithm go together"),
        (["cartpole-a2c", "--algorithm", "ppo"], "leave out --algorithm"),
        (["env.py:make", "--algorithm", "ppo"], "environment: --env env.py:make --algorithm ppo"),
        (["--evn", "Acrobot-v1", "--algorithm", "a2c"], "There is no option --evn. Did you mean --env?"),
        (
            ["--env", "Acrobot-v1", "--algoritm=a2c"],
            "There is no option --algoritm. Did you mean --algorithm?",
        ),
        (["--env", "Acrobot-v1", "--algorithm", "A2C"], "no algorithm called 'A2C'. Did you mean 'a2c'?"),
        (["--env", "Acrobot-v1", "--algorithm", "a2d"], "no algorithm called 'a2d'. Did you mean 'a2c'"),
        (["--env", "their_envs.py:make_en", "--algorithm", "a2c"], "class or function 'make_en'"),
        (["--env", "their_envs.py", "--algorithm", "a2c"], "is a file. Name the class or function"),
        (
            ["--env", "Acrobot-v9", "--algorithm", "a2c"],
            "registered as 'Acrobot-v9'. Did you mean 'Acrobot-v1'? Name the module",
        ),
        (
            ["cartpole-a2c", "--env", "Acrobot-v1", "--algorithm", "a2c"],
            "'cartpole-a2c' belongs to no option",
        ),
        (
            ["--env", "Acrobot-v1", "--algorithm", "a2c", "--world.frame-stack", "0"],
            "--world.frame-stack",
        ),
        (  # it would not fit into memory
            ["--env", "Acrobot-v1", "--algorithm", "a2c", "--world.frame-stack", "1000000000"],
            "it must be from 1 to 1000",
        ),
        (
            ["--env", "Acrobot-v1", "--algorithm", "a2c", "--world.observe", "eye"],
            "no Dict with the key 'eye'",
        ),
    ],
)
def test_mistakes_are_refused(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_envs.py").write_text(FILE)
    assert sentence in refused(capsys, "train", *words, *SHORT)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["train", "simulate"])
def test_the_order_of_options_does_not_matter(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_envs.py").write_text(FILE)
    words = ["--updates", "2", "--algorithm", "a2c", "--simulators", "2", "--env", "their_envs.py:make_env"]
    extra = ["--launcher", "inline"] if verb == "train" else []
    assert main([verb, *words, *extra, "--eval-episodes", "1"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("their_envs.py-make_env-a2c-")
    stored = json.loads((folder / "run.json").read_text())
    assert stored["world"]["target"] == f"{tmp_path}/their_envs.py:make_env"
    assert stored["updates"] == 2
    assert "Evaluation over 1 game" in capsys.readouterr().out


FAULTY = """
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

class Raises(CartPoleEnv):
    def step(self, action):
        raise KeyError("motor")

class WrongShape(CartPoleEnv):
    def step(self, action):
        return np.zeros(3), 0.0, False, False, {}
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Raises", "raised KeyError in step: 'motor'. It failed 6 times in a row (their_envs.py:7 in step)"),
        ("WrongShape", "raised ValueError in step: its observation has the shape [3], not [4]"),
    ],
)
def test_an_environment_that_fails_at_once_is_refused_once_before_the_run(
    name: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_envs.py").write_text(FAULTY)
    words = ["--env", f"their_envs.py:{name}", "--algorithm", "a2c", "--replicas", "2", "--updates", "2"]
    for verb in ("train", "simulate"):
        assert main([verb, *words]) == 2
        assert capfd.readouterr().err.count(sentence) == 1
    assert not (tmp_path / "runs").exists()


FAILS_AT_SEED_1 = """
from gymnasium.envs.classic_control import CartPoleEnv

class Failing(CartPoleEnv):
    failing = False

    def reset(self, *, seed=None, options=None):
        import sys
        Failing.failing = "seed-1" in " ".join(sys.argv)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if Failing.failing:
            raise RuntimeError("no more")
        return super().step(action)
"""


def test_a_sweep_of_an_own_environment_goes_on_without_a_seed_that_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_envs.py").write_text(FAILS_AT_SEED_1)
    words = ["--env", "their_envs.py:Failing", "--algorithm", "a2c", "--seeds", "0-1", "--out", "sweep"]
    short = ["--launcher", "inline", "--simulators", "2", "--updates", "5", "--eval-episodes", "1"]
    assert main(["train", *words, *short]) == 1
    out = capfd.readouterr().out
    assert "Try these again with: murmurate train env:" in out
    assert "eval_return_mean of 1 run: mean" in out
    assert (tmp_path / "sweep" / "report.html").is_file()
    assert main(["report", "sweep", "--out", "again.html"]) == 0


def test_tune_takes_an_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_envs.py").write_text(FILE)
    words = ["--env", "their_envs.py:make_env", "--algorithm", "a2c", "--trials", "1", "--out", "study"]
    short = ["--launcher", "inline", "--simulators", "2", "--updates", "3", "--eval-episodes", "1"]
    assert main(["tune", *words, "--search", "agent.hidden=8,16", *short]) == 0
    assert "murmurate train env:" in capfd.readouterr().out


PICTURES = """
import gymnasium
import numpy as np

class Pictures(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (24, 24, 3), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros((24, 24, 3), np.float32), {}

    def step(self, action):
        return np.zeros((24, 24, 3), np.float32), 0.0, True, False, {}

class Beside(gymnasium.Wrapper):

    def __init__(self):
        super().__init__(Pictures())
        left, right = self.observation_space, gymnasium.spaces.Box(0, 255, (24, 24, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Dict({
            "eyes": gymnasium.spaces.Dict({"left": left, "right": right}),
            "map": gymnasium.spaces.Box(0, 1, (24, 24), np.float32),
        })

    def reset(self, **options):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, True, False, {}
"""


def test_images_that_an_mlp_would_read_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    (file := tmp_path / "their_pictures.py").write_text(PICTURES)
    command = ["train", "--env", f"{file}:Pictures", "--algorithm", "a2c", "--updates", "2", "--dry-run"]
    with pytest.warns(UserWarning, match=r"the shape \[24, 24, 3\], and an MLP reads it as one vector"):
        assert main(command) == 0
    assert main([*command, "--agent.torso", "mlp"]) == 0  # chosen, so nobody is warned
    assert not [warning for warning in recwarn if "an MLP reads" in str(warning.message)]
    capsys.readouterr()


def test_images_in_a_dict_that_are_read_as_numbers_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "their_pictures.py").write_text(PICTURES)
    command = ["train", "--env", f"{file}:Beside", "--algorithm", "a2c", "--updates", "2", "--dry-run"]
    words = r"the part 'eyes.left' of an observation of env:.* has the shape \[24, 24, 3\], and an MLP reads"
    with pytest.warns(UserWarning, match="an MLP reads") as warned:
        assert main(command) == 0
    (message,) = [str(each.message) for each in warned if "an MLP reads" in str(each.message)]
    assert re.match(words, message)
    capsys.readouterr()


NORMALIZED = """
from gymnasium.envs.classic_control import PendulumEnv
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TimeLimit

def make_env():
    return NormalizeReward(NormalizeObservation(TimeLimit(PendulumEnv(), 200)))

def make_shaped(training=True):
    env = TimeLimit(PendulumEnv(), 200)
    return NormalizeReward(env) if training else env

def make_frozen():
    env = NormalizeObservation(TimeLimit(PendulumEnv(), 200))
    env.update_running_mean = False
    return env
"""


@pytest.mark.parametrize(
    ("function", "algorithm", "told"),
    [
        ("make_env", "ppo", ["--agent.normalize-observations true", "--agent.scale-rewards true"]),
        ("make_env", "td3", ["--agent.normalize-observations true", "scale rewards by a constant"]),
        ("make_shaped", "ppo", []),
        ("make_frozen", "ppo", []),
    ],
)
def test_wrappers_whose_statistics_no_evaluation_has_are_warned_of(
    function: str,
    algorithm: str,
    told: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    (file := tmp_path / "their_normalized.py").write_text(NORMALIZED)
    command = ["train", "--env", f"{file}:{function}", "--algorithm", algorithm, "--dry-run"]
    assert main([*command, "--world.frame-stack", "2"]) == 0
    messages = [str(warning.message) for warning in recwarn if "Normalize" in str(warning.message)]
    assert len(messages) == len(told)
    assert all(remedy in message for remedy, message in zip(told, messages, strict=True))
    capsys.readouterr()


ROVER = """
import gymnasium
import numpy as np


class Rover(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, low, high):
        self.action_space = gymnasium.spaces.Box(np.float32([-1, low]), np.float32([1, high]))

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, True, False, {}


def radians():
    return Rover(-0.1, 0.1)


def rpm():
    return Rover(0, 5000)


def percent():
    return Rover(2, 5)


def usual():
    return Rover(-0.4, 0.4)


def unbounded():
    return Rover(-np.inf, np.inf)
"""


@pytest.mark.parametrize(
    ("name", "algorithm", "words"),
    [
        ("radians", "ppo", "component 1 .* from -0.1 to 0.1, .*: most of its draws are clipped"),
        ("rpm", "a2c", "from 0 to 5000, .*: its draws reach little of that"),
        ("percent", "a2c", "from 2 to 5, .*: most of its draws are clipped"),
        ("usual", "ppo", ""),
        ("unbounded", "ppo", ""),
        ("radians", "td3", ""),
    ],
)
def test_actions_whose_bounds_do_not_fit_the_first_draws_are_warned_of(
    name: str, algorithm: str, words: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (file := tmp_path / "their_rovers.py").write_text(ROVER)
    command = ["train", "--env", f"{file}:{name}", "--algorithm", algorithm, "--env-steps", "1000000"]
    assert main([*command, "--dry-run"]) == 0
    said = [str(warning.message) for warning in recwarn if "--world.rescale" in str(warning.message)]
    assert len(said) == bool(words)
    assert all(re.search(words, each) for each in said)
    if words:
        recwarn.clear()
        assert main([*command, "--world.rescale-actions", "true", "--dry-run"]) == 0
        assert not [each for each in recwarn if "--world.rescale" in str(each.message)]
