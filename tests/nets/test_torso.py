"""Torsos by name, and from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from murmurate import plugins
from murmurate.agents.a2c import A2C
from murmurate.agents.dqn import DQN
from murmurate.cli.main import main
from murmurate.nets.actor_critic import actor_critic
from murmurate.nets.q_network import q_network
from murmurate.nets.torso import build_torso, torsos, usual_torso
from murmurate.spec import EnvSpec
from short_runs import SHORT, refused

VECTOR = EnvSpec("vector", (4,), torch.float32, 3)

_MINE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Settings:
    width: int = 12

class Wide(nn.Module):
    def __init__(self, inputs, widths):
        super().__init__()
        self.first = nn.Conv1d(1, widths[0], inputs)
        self.norm = nn.LayerNorm(widths[0])
        self.last = nn.Linear(widths[0], Settings().width)
        self.out_features = Settings().width

    def forward(self, observation):
        x = observation.to(self.last.weight.dtype)[:, None]
        return torch.relu(self.last(self.norm(self.first(x)[:, :, 0])))

def wide(spec, hidden):
    return Wide(spec.observation_shape[0], hidden)

def nameless(spec, hidden):
    return nn.Linear(4, 4).requires_grad_(False).weight

class Drop(nn.Sequential):
    out_features = 8

    def __init__(self, spec, hidden):
        super().__init__(nn.Linear(spec.observation_shape[0], 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

class Untrue(nn.Linear):
    out_features = 5

    def __init__(self, spec, hidden):
        super().__init__(spec.observation_shape[0], 7)
        self.out_features = 5

def blind(spec, hidden):
    return nn.Linear(99, 4)

TORSOS = {"wide": wide}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "my_net.py").write_text(_MINE)
    return tmp_path / "my_net.py"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("make", [actor_critic, q_network])
def test_one_in_a_file_is_drawn_from_the_generator_and_nothing_else(make, file):  # type: ignore[no-untyped-def]
    nets = []
    for seed in (3, 3, 4):
        torch.rand(5)
        state = torch.get_rng_state()
        nets.append(make(VECTOR, generator=generator(seed), torso=f"{file}:wide", hidden=(7, 7)))
        assert torch.equal(torch.get_rng_state(), state)
    one, same, other = (net.torso.first.weight for net in nets)
    assert one.shape == (7, 1, 4)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    given = nets[0](torch.randn(5, 4))
    assert (given[0] if make is actor_critic else given).shape == (5, 3)


def test_one_in_a_file_is_trained_and_taken_up_from_another_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--agent.torso", "my_net.py:wide", "--out", "run"]
    assert main(["train", "cartpole-dqn", *SHORT, *arguments, "--replay.learning-starts", "50"]) == 0
    assert json.loads(Path("run/run.json").read_text())["agent"]["torso"] == f"{file}:wide"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["resume", str(tmp_path / "run"), "--updates", "4"]) == 0
    assert main(["eval", str(tmp_path / "run"), "--episodes", "1"]) == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("natur2013", "no torso called 'natur2013' (did you mean 'nature2013'?): use auto, "),
        ("nowhere.py:wide", "there is no file"),
        ("my_net.py:thin", "function 'thin' in"),
        ("my_net.py:nameless", "set its out_features"),
        ("nature2015", "nature2015 reads uint8 images [C, H, W]"),
        ("my_net.py:Untrue", "must return features [B, 5], as its out_features says, and for 2 observations"),
        ("my_net.py:blind", "blind raised RuntimeError on observations [2, 4] of float32: mat1 and mat2"),
    ],
)
def test_what_is_no_torso_here_is_refused(
    name: str,
    words: str,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused(capsys, "train", "cartpole-a2c", "--agent.torso", name, "--out", "run")
    assert not Path("run").exists()


def test_the_trial_leaves_statistics_modes_and_generators_alone(file: Path) -> None:
    state = torch.get_rng_state()
    torso = build_torso(VECTOR, f"{file}:Drop", (8, 8))
    _, norm, drop = torso.children()
    assert norm.num_batches_tracked == 0
    assert norm.training
    assert drop.training
    torch.set_rng_state(state)
    again = build_torso(VECTOR, f"{file}:Drop", (8, 8))
    assert all(torch.equal(a, b) for a, b in zip(torso.parameters(), again.parameters(), strict=True))


def test_one_of_somebody_else_joins_by_an_entry_point(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = file.parent / "my_net-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-net\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[murmurate.nets]\nanything = my_net\n")
    assert set(torsos()) >= {"mlp", "nature2013", "nature2015", "jin2018"}
    monkeypatch.syspath_prepend(file.parent)
    plugins.modules.cache_clear()
    try:
        assert A2C(torso="wide").torso == DQN(torso="wide").torso == "wide"
        net = q_network(VECTOR, generator=generator(0), torso="wide", hidden=(5,))
        assert net(torch.randn(2, 4)).shape == (2, 3)
    finally:
        plugins.modules.cache_clear()


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ((4, 84, 84), torch.uint8, "nature2013"),
        ((3, 20, 30), torch.uint8, "nature2013"),
        ((3, 7, 7), torch.uint8, "mlp"),
        ((3, 84, 84), torch.float32, "mlp"),
        ((9,), torch.uint8, "mlp"),
    ],
)
def test_what_suits_an_observation(shape: tuple[int, ...], kind: torch.dtype, expected: str) -> None:
    spec = EnvSpec("world", shape, kind, 3)
    assert usual_torso(spec) == expected
    net = q_network(spec, generator=generator(0))
    assert net(torch.zeros(2, *shape, dtype=kind)).shape == (2, 3)
