"""With the core's dependencies alone all works that needs no more; what does names the extra to install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from short_runs import SHORT

_LISTS = ("launchers", "recipes", "strategies", "fabrics", "agents", "benches")
_BARE = """
import contextlib, io, json, sys
extras = "cryptography ray ale_py mujoco cv2 imageio imageio_ffmpeg pygame stable_baselines3 scipy sklearn"
for name in [*extras.split(), "vizdoom", "miniworld", "dm_control", "gymnasium_robotics", "triton"]:
    sys.modules[name] = None  # an import of it fails
from murmurate.cli.main import main
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
try:
    import murmurate.sklearn.in_memory  # which the processes of replicas import
    from murmurate.sklearn import LatentDirichletAllocation
except Exception as error:
    print(json.dumps([2, "", f"{type(error).__name__}: {error}"]))
else:
    print(json.dumps([0, "", ""]))
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bare")


@pytest.fixture(scope="module")
def bare(folder: Path) -> dict[str, Done]:
    """Commands, by their words before the first option, of one process in which every extra is missing; and
    an import of the estimator."""
    run, other = str(folder / "run"), str(folder / "other")
    commands = [
        *(["list", what] for what in _LISTS),
        ["doctor", "--json"],
        ["train", "cartpole-gala", *SHORT, "--out", run],
        ["eval", run, "--video"],
        ["train", "pong-gala", "--out", other],
        ["train", "hopper-a2c", "--out", other],
        ["train", "dmc-cheetah-run-a2c", "--out", other],
        ["train", "adroit-pen-a2c", "--out", other],
    ]
    command = [sys.executable, "-c", _BARE, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [Done(*json.loads(line)) for line in done.stdout.splitlines()]
    return {" ".join(words[:2]): one for words, one in zip([*commands, ["estimator"]], found, strict=True)}


@pytest.mark.parametrize("what", _LISTS)
def test_the_core_lists_without_an_extra(what: str, bare: dict[str, Done]) -> None:
    assert bare[f"list {what}"].code == 0, bare[f"list {what}"].err
    assert bare[f"list {what}"].out


def test_the_core_trains_without_an_extra(bare: dict[str, Done], folder: Path) -> None:
    assert bare["train cartpole-gala"].code == 0, bare["train cartpole-gala"].err
    assert (folder / "run" / "summary.json").exists()


def test_the_doctor_names_the_extras(bare: dict[str, Done]) -> None:
    assert bare["doctor --json"].code == 0, bare["doctor --json"].err
    found = {c["name"]: c for c in json.loads(bare["doctor --json"].out.splitlines()[-1])["checks"]}
    assert "murmurate[atari]" in found["Atari"]["advice"]
    assert "murmurate[mujoco]" in found["MuJoCo"]["advice"]
    assert "murmurate[video]" in found["video"]["advice"]


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("train pong-gala", "ale-py", "atari"),
        ("train hopper-a2c", "mujoco", "mujoco"),
        ("train dmc-cheetah-run-a2c", "dm_control", "control"),
        ("train adroit-pen-a2c", "gymnasium-robotics", "adroit"),
        ("eval {run}", "imageio-ffmpeg", "video"),
    ],
)
def test_a_missing_extra_is_named_with_its_command(
    command: str, package: str, extra: str, bare: dict[str, Done], folder: Path
) -> None:
    done = bare[command.format(run=folder / "run")]
    assert done.code == 2, done.err
    (line,) = done.err.splitlines()
    assert f"{package}, which is not installed. Run: pip install 'murmurate[{extra}]'" in line
    assert not (folder / "other").exists()
    assert not (folder / "run" / "videos").exists()


def test_the_estimator_names_its_extra(bare: dict[str, Done]) -> None:
    said = bare["estimator"].err
    assert said.startswith("MissingExtra: The estimator needs the package scikit-learn")
    assert "pip install 'murmurate[topics]'" in said
