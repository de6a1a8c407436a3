"""``murmurate.load``: observations and actions of every space, and nets of a user's own."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from made_models import MakeModel

import murmurate
from murmurate.worlds.gym import GymWorld


def test_discrete_observations_are_no_one_hot_vector(trained: MakeModel) -> None:
    """FrozenLake has 16 states; 16 of their numbers have the shape of one one-hot vector."""
    model = trained("gym:FrozenLake-v1-a2c", agent={"hidden": 8})
    singly = [model.act(state) for state in range(16)]
    assert all(np.ndim(action) == 0 for action in singly)
    np.testing.assert_array_equal(model.act(np.arange(16)), singly)
    np.testing.assert_array_equal(model.act(np.arange(5)), singly[:5])
    np.testing.assert_array_equal(model.act(np.eye(16, dtype=np.float32)), singly)


NETS = """
import gymnasium
import numpy as np
from gymnasium import spaces
from torch import nn


class Crane(gymnasium.Env):
    observation_space = spaces.Dict(
        {"load": spaces.Box(-5, 5, (2,), np.float64), "goal": spaces.Box(-1, 1, (1, 2), np.float32)}
    )
    action_space = spaces.Box(np.array([-1.0, -0.5], np.float32), np.array([2.0, 0.5], np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), {}

    def look(self):
        load, goal = self.np_random.uniform(-1, 1, 2), self.np_random.uniform(-1, 1, (1, 2))
        return {"load": load, "goal": goal.astype(np.float32)}

    def step(self, action):
        self.steps += 1
        return self.look(), 1.0, self.steps == 5, False, {}


class Numbers(Crane):
    observation_space = spaces.Discrete(5, start=-2)

    def look(self):
        return self.observation_space.sample()


class Many(Numbers):
    observation_space = spaces.MultiDiscrete([3, 2], start=[1, 5])


class Bits(Numbers):
    observation_space = spaces.MultiBinary([2, 2])


class Mixed(Numbers):
    observation_space = spaces.Tuple((spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,), np.float64)))


class Branching(nn.Sequential):
    out_features = 8

    def __init__(self, spec, hidden):
        super().__init__(nn.Linear(4, 8))

    def forward(self, observation):
        return super().forward(observation if observation.sum() > 0 else 2 * observation)


class Drop(nn.Sequential):
    out_features = 8

    def __init__(self, spec, hidden):
        super().__init__(nn.Linear(spec.observation_shape[0], 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
"""


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("nets") / "nets_of_theirs.py"
    file.write_text(NETS)
    return file


def test_dropout_and_batch_norm_are_for_training(trained: MakeModel, nets: Path, tmp_path: Path) -> None:
    model = trained("cartpole-a2c", agent={"torso": f"{nets}:Drop"}, simulators=2)
    batch = np.random.default_rng(0).normal(size=(200, 4))
    values = [model.act(batch) for _ in range(3)]
    np.testing.assert_array_equal(values[0], values[1])
    np.testing.assert_array_equal(values[0], [model.act(row) for row in batch])
    assert model.evaluate(3, seed=1) == model.evaluate(3, seed=1)
    assert model.export(tmp_path / "policy.pt2").outputs == ("action", "logits", "value")


def test_a_net_that_cannot_be_traced_is_refused_without_its_graph(
    trained: MakeModel, nets: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = trained("cartpole-a2c", agent={"torso": f"{nets}:Branching"}, simulators=2)
    capfd.readouterr()
    with pytest.raises(murmurate.Refusal, match=r"cannot trace this model.*branch on numbers"):
        model.export(tmp_path / "policy.pt2")
    assert capfd.readouterr().err == ""


def test_a_batch_of_a_dict_space_is_one_of_arrays_or_a_list(trained: MakeModel, nets: Path) -> None:
    model = trained(env=f"{nets}:Crane", algorithm="a2c", simulators=2)
    for size in (1, 3):
        load = np.random.default_rng(size).normal(size=(size, 2))
        batch = {"load": load, "goal": np.ones((size, 1, 2), np.float32)}
        singles = [{"load": batch["load"][b], "goal": batch["goal"][b]} for b in range(size)]
        together = model.act(batch)
        assert together.shape == (size, 2)
        np.testing.assert_allclose(together, [model.act(single) for single in singles], rtol=1e-5)
        np.testing.assert_allclose(together, model.act(singles), rtol=1e-5)


def _tensors(observation: Any) -> Any:
    if isinstance(observation, (list, tuple)):
        return type(observation)(map(_tensors, observation))
    return torch.as_tensor(observation)


@pytest.mark.parametrize("name", ["Numbers", "Many", "Bits", "Mixed"])
def test_discrete_and_tuple_observations_may_be_tensors_and_lists(
    name: str, trained: MakeModel, nets: Path
) -> None:
    model = trained(env=f"{nets}:{name}", algorithm="a2c", simulators=2)
    space = runpy.run_path(str(nets))[name].observation_space
    space.seed(0)
    singles = [space.sample() for _ in range(3)]
    batch = tuple(map(np.stack, zip(*singles, strict=True))) if name == "Mixed" else np.stack(singles)
    expected = [model.act(single) for single in singles]
    np.testing.assert_array_equal([model.act(_tensors(single)) for single in singles], expected)
    for form in (batch, _tensors(batch), singles, _tensors(singles)):
        np.testing.assert_allclose(model.act(form), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        (None, "'goal' of its observation is missing"),
        ({"load": np.zeros(2)}, "'goal' of its observation is missing"),
        ([1, 2, 3, 4, 5], "'goal' of its observation is missing"),
        ({"load": np.zeros(3), "goal": np.zeros((1, 2))}, r"'load' of its observation has the shape \[3\]"),
        ({"load": np.zeros((2, 2)), "goal": np.zeros((3, 1, 2))}, "'goal' of its observation has the shape"),
        ({"load": [np.nan, 0.0], "goal": np.zeros((1, 2))}, "not finite"),
    ],
)
def test_what_a_dict_space_takes_is_said(
    observation: Any, words: str, trained: MakeModel, nets: Path
) -> None:
    with pytest.raises(murmurate.Refusal, match=words) as refusal:
        trained(env=f"{nets}:Crane", algorithm="a2c", simulators=2).act(observation)
    takes = "It takes a Dict with the keys goal (1, 2), load (2,), or a batch of these."
    assert takes in str(refusal.value) or words == "not finite"


def test_observations_and_actions_are_the_environments_own(trained: MakeModel) -> None:
    model = trained(env="gym:Taxi-v4", algorithm="a2c", simulators=2)
    env = gymnasium.make("Taxi-v4")
    seen, _ = env.reset(seed=0)
    for _ in range(5):
        action = model.act(seen)
        assert env.action_space.contains(action)
        seen, *_ = env.step(action)
    assert model.act([1, 2, 3]).shape == (3,)
    with pytest.raises(murmurate.Refusal, match="observation"):
        model.act(1.5)


def test_rescaled_actions_of_stacked_observations_play_in_the_environment(
    trained: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(
        env="gym:Pendulum-v1", algorithm="td3", world={"rescale_actions": True, "frame_stack": 3},
        replay={"learning_starts": 256}, simulators=2,
    )  # fmt: skip
    assert model.spec.action_high == (1.0,)
    env = gymnasium.make("Pendulum-v1")
    seen, _ = env.reset(seed=3)
    stack = [seen] * 3
    model.export(tmp_path / "policy.pt2")
    program = torch.export.load(tmp_path / "policy.pt2").module()
    for _ in range(5):
        action = model.act(seen)
        assert env.action_space.contains(action)
        whole = torch.from_numpy(np.concatenate(stack))[None]
        (exported,) = program(whole)
        np.testing.assert_allclose(exported[0].detach().numpy(), action, rtol=1e-5, atol=1e-6)
        seen, *_ = env.step(action)
        stack = [*stack[1:], seen]
    monkeypatch.setattr(GymWorld, "formats", lambda world: None)  # as in the Control Suite
    again = murmurate.load(model.folder)
    whole = np.concatenate(stack)[None]
    (exported,) = program(torch.from_numpy(whole))
    np.testing.assert_allclose(exported.detach().numpy(), again.act(whole), rtol=1e-5, atol=1e-6)


def test_the_order_of_a_flattened_observation_is_in_the_metadata(
    trained: MakeModel, nets: Path, tmp_path: Path
) -> None:
    from safetensors import safe_open

    world = {"observe": ["load", "goal"], "frame_stack": 2}
    model = trained(env=f"{nets}:Crane", algorithm="td3", world=world, replay={"learning_starts": 256})
    model.export(tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["murmurate"])
    assert metadata["observation_parts"] == [["goal", 0, 2, []], ["load", 2, 4, []]]
    assert metadata["observation_stack"] == 2

    env = runpy.run_path(str(nets))["Crane"]()
    earlier, _ = env.reset(seed=1)
    newest, *_ = env.step(None)
    inputs = np.zeros((1, 8), np.float32)
    for first, observation in ((0, earlier), (4, newest)):
        for path, start, stop, _ in metadata["observation_parts"]:
            inputs[0, first + start : first + stop] = observation[path].ravel()
    model.act(earlier)
    np.testing.assert_allclose(model.act(newest), model.act(inputs)[0], rtol=0, atol=1e-7)
