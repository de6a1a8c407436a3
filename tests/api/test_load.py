"""``murmurate.load``: acting, evaluating, exporting."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import resource
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import murmurate
from murmurate.api.export import export_weights, largest_error
from murmurate.cli.main import main
from murmurate.errors import RunFailed
from murmurate.training.restore import load_agent
from murmurate.worlds.gym import GymWorld
from smallest import smallest

MakeModel = Callable[..., murmurate.TrainedModel]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Loads the model of a recipe that was trained for two updates; each is trained once."""
    made: dict[str, Path] = {}

    def model(recipe: str | None = None, **options: Any) -> murmurate.TrainedModel:
        key = repr((recipe, options))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model") / "run"
            murmurate.train(
                recipe, updates=2, launcher="inline", eval_episodes=1, quiet=True, out=made[key], **options
            )
        return murmurate.load(made[key])

    return model


PONG: dict[str, Any] = {"simulators": 2, "eval_max_env_steps": 50}
RECURRENT: dict[str, Any] = {
    "simulators": 4, "agent": {"recurrent": 8, "normalize_observations": True, "hidden": 8, "steps": 16},
}  # fmt: skip


def test_discrete_observations_are_no_one_hot_vector(trained: MakeModel) -> None:
    """FrozenLake has 16 states; 16 of their numbers have the shape of one one-hot vector."""
    model = trained("gym:FrozenLake-v1-a2c", agent={"hidden": 8})
    singly = [model.act(state) for state in range(16)]
    assert all(np.ndim(action) == 0 for action in singly)
    np.testing.assert_array_equal(model.act(np.arange(16)), singly)
    np.testing.assert_array_equal(model.act(np.arange(5)), singly[:5])
    np.testing.assert_array_equal(model.act(np.eye(16, dtype=np.float32)), singly)


def test_one_observation_or_a_batch_of_numbers_or_tensors(trained: MakeModel) -> None:
    model = trained("cartpole-a2c")
    batch = np.random.default_rng(0).normal(size=(50, 4))
    together = model.act(batch)
    assert together.shape == (50,)
    assert set(together) == {0, 1}
    singly = [model.act(row) for row in batch]
    assert all(gymnasium.spaces.Discrete(2).contains(action) for action in singly)
    np.testing.assert_array_equal(together, singly)
    np.testing.assert_array_equal(together, model.act(torch.from_numpy(batch)))
    np.testing.assert_array_equal(together, model.act(batch.tolist()))
    rounded = torch.from_numpy(batch).bfloat16()
    np.testing.assert_array_equal(model.act(rounded), model.act(rounded.double()))
    drawn = {tuple(model.act(batch, greedy=False)) for _ in range(5)}
    assert len(drawn) > 1


def test_drawn_actions_explore_as_much_as_the_training_did_in_the_end(trained: MakeModel) -> None:
    explores = {"explore_updates": 2, "epsilon": 0.0}
    replay = {"learning_starts": 64, "capacity": 500}
    model = trained("cartpole-dqn", agent=explores, replay=replay)
    batch = np.random.default_rng(0).normal(size=(50, 4))
    np.testing.assert_array_equal(model.act(batch, greedy=False), model.act(batch))


def test_a_policy_in_bfloat16_is_loaded_in_float32(trained: MakeModel) -> None:
    pytest.importorskip("mujoco")
    policy = {"hidden": (8, 8, 8), "precision": "bfloat16", "batch": 16}
    small = {"policy": policy, "model": {"hidden": 8, "improvement": 0.9}}  # its fit soon ends
    model = trained("inverted-pendulum-mbpo", agent=small, learning_starts=40, rollouts={"starts": 50})
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.float32}


def test_a_copy_of_a_checkpoint_is_loaded_evaluated_and_exported(
    trained: MakeModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, copies = trained("cartpole-a2c").folder, tmp_path / "kept"

    class Keep(murmurate.Callback):
        def on_checkpoint(self, folder: Path) -> None:
            shutil.copytree(folder, copies / str(len(list(copies.glob("*")))))

    run = tmp_path / "run"
    murmurate.train("cartpole-a2c", updates=2, launcher="inline", eval_episodes=1, quiet=True, out=run)
    copies.mkdir()
    murmurate.resume(run, updates=4, callbacks=[Keep()], quiet=True)
    copy = tmp_path / "copy"
    (copies / "0").rename(copy)
    murmurate.resume(run, updates=6, quiet=True)

    def weights(**which: Any) -> Any:
        return next(iter(murmurate.load(run, **which)._learner.replicas.values())).params.clone()

    assert not torch.equal(weights(checkpoint=copy), weights())
    assert torch.equal(weights(checkpoint=run / "checkpoints/last"), weights())
    model = murmurate.load(run, checkpoint=copy)
    assert model.folder == run
    assert main(["eval", str(run), "--checkpoint", str(copy), "--episodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["returns"] == model.evaluate(2)["returns"]
    to = tmp_path / "weights.safetensors"
    assert main(["export", str(run), "--checkpoint", str(copy), "--to", str(to)]) == 0
    exported = load_file(to)
    assert all(torch.equal(exported[name], values) for name, values in model._tensors().items())
    with pytest.raises(murmurate.Refusal, match="holds no checkpoint"):
        murmurate.load(run, checkpoint=folder)
    with pytest.warns(UserWarning, match=f"a checkpoint of the run in {folder.resolve()}, and not of {run}"):
        murmurate.load(run, checkpoint=folder / "checkpoints/last")
    monkeypatch.chdir(run.parent)
    with pytest.warns(UserWarning, match=f"and not of {run.resolve()}"):
        murmurate.load(run.name, checkpoint=folder / "checkpoints/last")
    with pytest.raises(murmurate.Refusal, match="Leave one of them out"):
        murmurate.load(run, checkpoint=copy, best=True)
    assert main(["export", str(run), "--checkpoint", str(copy), "--csv", str(tmp_path / "r.csv")]) == 2


def test_the_model_is_built_once(trained: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained("cartpole-a2c").folder
    built: list[Path] = []

    def load_and_count(run: Any, checkpoint: Path, of: Path, device: Any) -> Any:
        built.append(checkpoint)
        return load_agent(run, checkpoint, of, device)

    monkeypatch.setattr("murmurate.training.restore.load_agent", load_and_count)
    murmurate.load(folder)
    assert len(built) == 1


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        (np.zeros(3), "observation"),
        (np.zeros((2, 2, 4)), "observation"),
        (1.0, "observation"),
        ("left", "observation"),
        ({"a": 1}, "observation"),
        ([np.inf] * 4, "not finite"),
        ([1e300] * 4, "not finite"),
        (np.zeros((0, 4)), "no observation in the batch"),
        ([], "no observation in the batch"),
        ((np.zeros(4), {}), r"reset\(\) returns \(observation, info\)"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_other_observations_are_refused(observation: Any, words: str, trained: MakeModel) -> None:
    with pytest.raises(murmurate.Refusal, match=words):
        trained("cartpole-a2c").act(observation)


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


def test_a_recurrent_agent_remembers_until_it_is_reset(trained: MakeModel) -> None:
    """Against the agent itself, whose memory is handed on here."""
    model = trained("cartpole-ppo", **RECURRENT)
    agent = load_agent(model.run, model.folder / "checkpoints" / "last")
    observations = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0)) * 3
    memory, memories = agent.initial_memory(3), []
    for t, observation in enumerate(observations):
        if t == 4:
            model.reset(np.array([False, True, False]))
        first = torch.tensor([t == 0, t in (0, 4), t == 0])
        expected = agent.act(observation, memory, first, torch.Generator(), greedy=True)
        memory = expected.memory
        np.testing.assert_array_equal(model.act(observation), expected.action.numpy())
        torch.testing.assert_close(model._memory, memory)
        memories.append(memory)
    assert not torch.allclose(memories[3], memories[4])
    with pytest.raises(murmurate.Refusal, match=r"Call reset\(\)"):
        model.act(observations[0, :2])
    with pytest.raises(murmurate.Refusal, match="ended has 2 rows, and the last observations had 3"):
        model.reset([True, False])
    model.reset()
    assert model.act(observations[0, 0]) in (0, 1)


def test_a_pickled_model_goes_on_as_it_is_and_reads_no_folder(trained: MakeModel, tmp_path: Path) -> None:
    trained_model = trained("cartpole-ppo", **RECURRENT)
    shutil.copytree(trained_model.folder, folder := tmp_path / "run")
    model = murmurate.load(folder)
    with torch.no_grad():
        for values in model.module.parameters():
            values += 0.1
    observations = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(0)) * 3
    model.act(observations[0], greedy=False)
    before = pickle.dumps(model)
    shutil.rmtree(folder)
    other = pickle.loads(before)
    assert (other.spec, other.run, other.folder) == (model.spec, model.run, model.folder)
    for observation in observations[1:]:
        np.testing.assert_array_equal(
            other.act(observation, greedy=False), model.act(observation, greedy=False)
        )
    torch.testing.assert_close(other._memory, model._memory, rtol=0, atol=0)


def test_the_newest_of_stacked_images_alone_is_enough(trained: MakeModel) -> None:
    model = trained("pong-a2c", **PONG)
    images = np.random.default_rng(0).integers(0, 256, (6, 1, 84, 84), np.uint8)
    padded = np.concatenate([np.zeros((3, 1, 84, 84), np.uint8), images])  # as ale-py begins a game
    wholes = [np.concatenate(padded[t : t + 4]) for t in range(6)]
    begun = model.run.world.open(1, training=False).reset(seed=0).observation[0]
    assert not begun[:3].any()
    assert begun[3].any()
    expected = [model.act(whole) for whole in wholes]
    for image, whole, action in zip(images, wholes, expected, strict=True):
        assert model.act(image) == action
        np.testing.assert_array_equal(model._stack, whole[None])
    with pytest.raises(murmurate.Refusal, match="float64"):
        model.act(np.zeros((4, 84, 84)))


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


def test_an_onnx_policy_with_memory_plays_as_the_agent_does(trained: MakeModel, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = trained("cartpole-ppo", **RECURRENT)
    written = model.export(tmp_path / "policy.onnx")
    assert written.inputs == ("observation", "memory", "first")
    assert written.outputs == ("action", "logits", "value", "new_memory")
    assert 0 < written.max_error < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    metadata = json.loads(session.get_modelmeta().custom_metadata_map["murmurate"])
    assert metadata["run"]["recipe"] == "cartpole-ppo"
    assert [put.shape[0] for put in (*session.get_inputs(), *session.get_outputs())] == ["batch"] * 7
    env = gymnasium.make("CartPole-v1")
    seen, _ = env.reset(seed=1)
    memory, first = np.zeros((1, 16), np.float32), np.array([True])
    for _ in range(8):
        inputs = {"observation": np.float32(seen)[None], "memory": memory, "first": first}
        action, _, _, memory = session.run(None, inputs)
        assert action[0] == model.act(seen)
        first = np.array([False])
        seen, *_ = env.step(int(action[0]))


@pytest.mark.parametrize(
    ("recipe", "options", "outputs"),
    [
        ("cartpole-dqn", {"replay": {"learning_starts": 64}, "simulators": 2}, ("action", "action_values")),
        ("pong-a2c", PONG, ("action", "logits", "value")),
        (
            "halfcheetah-ppo",
            {"agent": {"steps": 32, "epochs": 1, "minibatches": 2}, "simulators": 2},
            ("action", "mean", "log_std", "value"),
        ),
    ],
)
def test_a_program_is_the_greedy_agent_for_batches_of_any_size(
    recipe: str, options: dict[str, Any], outputs: tuple[str, ...], trained: MakeModel, tmp_path: Path
) -> None:
    model = trained(recipe, **options)
    written = model.export(tmp_path / "policy.pt2")
    assert (written.inputs, written.outputs) == (("observation",), outputs)
    program = torch.export.load(tmp_path / "policy.pt2").module()
    for batch in (1, 5):
        (inputs,) = model.module.example(batch, torch.Generator().manual_seed(batch))  # type: ignore[operator]
        # on some processors the last bit of a sum depends on how it is compiled
        np.testing.assert_allclose(program(inputs)[0], model.act(inputs), rtol=0, atol=1e-7)
    size = sum(tensor.numel() * 4 for tensor in model._tensors().values())
    assert (tmp_path / "policy.pt2").stat().st_size < size + 300_000  # no parameter twice, no flat vector


def test_weights_are_all_parameters_with_what_rebuilds_the_net(trained: MakeModel, tmp_path: Path) -> None:
    from safetensors import safe_open

    model = trained("cartpole-ppo", **RECURRENT)
    model.export(tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        names, metadata = set(file.keys()), json.loads(file.metadata()["murmurate"])
        mean = file.get_tensor("ppo.normalizer.moments.mean")
        weight = file.get_tensor("ppo.policy_head.weight")
    assert "ppo.core.cell.weight_hh" in names
    assert mean.abs().sum() > 0
    (learner,) = load_agent(model.run, model.folder / "checkpoints" / "last").replicas.values()
    torch.testing.assert_close(weight, dict(learner.module.named_parameters())["policy_head.weight"].data)
    assert metadata["run"]["agent"]["recurrent"] == 8
    assert metadata["observation_shape"] == [4]


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


def test_actions_without_bounds_have_null_in_the_metadata(trained: MakeModel, tmp_path: Path) -> None:
    from safetensors import safe_open

    model = trained("cartpole-a2c")
    bounds: dict[str, Any] = {"action_low": (-np.inf, 0.0), "action_high": (1.0, np.inf)}
    model.__dict__["spec"] = dataclasses.replace(model.spec, actions=0, action_shape=(2,), **bounds)
    model.export(tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["murmurate"], parse_constant=pytest.fail)
    assert (metadata["action_low"], metadata["action_high"]) == ([None, 0.0], [1.0, None])


def test_an_export_to_a_link_replaces_the_file_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.safetensors").symlink_to("elsewhere/weights")
    for _ in range(2):
        export_weights(tmp_path / "link.safetensors", {"x": torch.ones(1)}, {})
    assert os.readlink(tmp_path / "link.safetensors") == "elsewhere/weights"
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["weights"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "link.safetensors"]


def test_weights_and_checkpoints_are_as_readable_as_other_files(trained: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    model = trained("cartpole-a2c")
    model.export(tmp_path / "weights.safetensors")
    files = [tmp_path / "weights.safetensors", *(model.folder / "checkpoints" / "last").iterdir()]
    assert {path.stat().st_mode for path in files} == {(tmp_path / "other").stat().st_mode}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt2"])
def test_an_export_that_does_not_fit_on_the_disk_says_so(
    suffix: str, trained: MakeModel, tmp_path: Path
) -> None:
    model = trained("cartpole-a2c")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(RunFailed, match=rf"net\{suffix} cannot be written: File too large"):
            model.export(tmp_path / f"net{suffix}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_an_export_that_computes_something_else_is_found(trained: MakeModel) -> None:
    program: Any = trained("cartpole-a2c").module
    assert largest_error(program, lambda inputs: list(program(*inputs))) == 0.0

    def off(inputs: Any) -> list[torch.Tensor]:
        action, logits, value = program(*inputs)
        return [action, logits + 1e-2, value]

    with pytest.raises(murmurate.RunFailed, match="another logits"):
        largest_error(program, off)
    with pytest.raises(murmurate.RunFailed, match="another action"):
        largest_error(program, lambda inputs: [1 - program(*inputs)[0], *program(*inputs)[1:]])


def test_a_classifier_predicts_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # what ~ stands for
    (tmp_path / "data").mkdir()
    run = dataclasses.replace(smallest("resnet20", tmp_path / "data"), launcher="inline", updates=2)
    murmurate.train(run, out="~/run", quiet=True)
    model = murmurate.load("~/run")
    images = np.random.default_rng(0).integers(0, 256, (3, *model.spec.observation_shape), np.uint8)
    probabilities = model.predict_proba(images)
    np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(model.predict(images), probabilities.argmax(1))
    np.testing.assert_allclose(model.predict_proba(images[0]), probabilities[0], rtol=1e-4)
    sizes = []
    with model.module.module.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0]))):
        many = model.predict_proba(np.resize(images, (260, *images.shape[1:])))
    assert sizes == [250, 10]  # a pass of any number would take any memory
    np.testing.assert_allclose(many, np.resize(probabilities, many.shape), rtol=1e-4)
    written = model.export("~/net.pt2")
    assert (written.inputs, written.outputs) == (("observation",), ("probabilities",))
    beside = {"murmurate.json": ""}
    program = torch.export.load(tmp_path / "net.pt2", extra_files=beside).module()
    (exported,) = program(torch.from_numpy(images))
    np.testing.assert_allclose(exported.detach(), probabilities, rtol=1e-4, atol=1e-6)
    assert len(model.classes) == probabilities.shape[1]
    assert json.loads(beside["murmurate.json"])["classes"] == model.classes
    assert model.evaluate(4)["test_images"] == 4
    with pytest.raises(murmurate.Refusal, match=r"keeps no best checkpoint: .* leave out --best"):
        murmurate.load("~/run", best=True)
    with pytest.raises(murmurate.Refusal, match=r"no actions that could be drawn\. .*sample=True"):
        model.evaluate(4, sample=True)
    with pytest.raises(murmurate.Refusal, match="Use predict"):
        model.act(images)


def test_topics_of_texts(tmp_path: Path) -> None:
    subjects = ("kettle boils water quickly", "novel tells moving story")
    (tmp_path / "texts.txt").write_text("".join(f"{subjects[k % 2]}\n" for k in range(40)))
    world = {"path": str(tmp_path / "texts.txt"), "bigrams": True}
    options: dict[str, Any] = {"launcher": "inline", "quiet": True, "env_steps": 800, "seed": 2}
    agent = {"topics": 2, "batch": 8, "alpha": 0.1, "prior": 0.1, "init": "random"}
    murmurate.train("corpus-lda", agent=agent, world=world, out=tmp_path / "run", **options)
    model = murmurate.load(tmp_path / "run")
    assert model.vocabulary == ["kettle_boils", "moving_story", "novel_tells", "water_quickly"]
    texts = ["The kettle boils water QUICKLY!", "a moving story, as the novel tells", "Something else"]
    shares = model.predict_proba(texts)
    assert shares.shape == (3, 2)
    assert shares[0].argmax() != shares[1].argmax()
    np.testing.assert_allclose(shares[2], 0.5)  # no word is known
    np.testing.assert_array_equal(model.predict_proba(texts[0]), shares[0])
    assert model.predict(texts[1]) == model.predict(np.array(texts))[1]


@pytest.mark.parametrize("recipe", ["table-gmm", "corpus-lda"])
def test_a_posterior_predicts(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two clusters of rows, or of documents with words of their own."""
    x = (
        np.random.default_rng(0).poisson(3.0, (60, 6))
        + np.repeat(np.eye(2, dtype=int) * 20, 3, 1)[[0, 1] * 30]
    )
    np.save(tmp_path / "x.npy", x)
    lines = [" ".join(f"{w}:{n}" for w, n in enumerate(row) if n) for row in x]
    (tmp_path / "x.ldac").write_text("".join(f"{line.count(':')} {line}\n" for line in lines))
    size = {"components": 2} if recipe == "table-gmm" else {"topics": 2}
    world = {"path": str(tmp_path / ("x.npy" if recipe == "table-gmm" else "x.ldac"))}
    options: dict[str, Any] = {"launcher": "inline", "quiet": True, "env_steps": 1000}
    murmurate.train(recipe, agent={"batch": 20, **size}, world=world, out=tmp_path / "run", **options)
    model = murmurate.load(tmp_path / "run")
    shares = model.predict_proba(x)
    np.testing.assert_allclose(shares.sum(1), 1.0, rtol=1e-5)
    assert (model.predict(x) == np.tile(model.predict(x[:2]), 30)).all()
    assert set(model.predict(x[:2])) == {0, 1}
    np.testing.assert_allclose(model.predict_proba(x[0]), shares[0], rtol=1e-5)
    estimate = model.estimate()
    if recipe == "table-gmm":
        np.testing.assert_array_equal(shares, estimate.responsibilities(x))
    else:
        assert [len(top) for top in estimate.top_words(3)] == [3, 3]
        with pytest.raises(murmurate.Refusal, match="counts"):
            model.predict(x + 0.5)
        sparse = pytest.importorskip("scipy.sparse").csr_matrix(x)
        np.testing.assert_array_equal(model.predict_proba(sparse), shares)
        with pytest.raises(murmurate.Refusal, match=r"has 5 columns, and .* vocabulary 6 words"):
            model.predict(sparse[:, :5])
        assert model.vocabulary == []
        with pytest.raises(murmurate.Refusal, match="without names of its words"):
            model.predict(["some words"])
    with pytest.raises(murmurate.Refusal, match="takes no actions"):
        model.act(x)
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "x.pt2")]) == 2
    assert "Export its weights: --to weights.safetensors" in capsys.readouterr().err


def test_what_cannot_be_loaded_or_exported_says_why(trained: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(murmurate.Refusal, match="holds no run"):
        murmurate.load(tmp_path)
    model = trained("cartpole-a2c")
    with pytest.raises(murmurate.Refusal, match=r"\.safetensors, \.pt2, \.onnx"):
        model.export(tmp_path / "policy.h5")
    with pytest.raises(murmurate.Refusal, match=r"Use \.pt2 for torch"):
        model.export(tmp_path / "policy.pt")
    with pytest.raises(murmurate.Refusal, match="seed is -2; it must be at least 0"):
        model.evaluate(seed=-2)
    with pytest.raises(murmurate.Refusal, match="cannot be written"):
        model.export(tmp_path / "nowhere" / "policy.safetensors")
    with pytest.raises(murmurate.Refusal, match="is an agent"):
        model.predict(np.zeros(4))
    with pytest.raises(murmurate.Refusal, match="has no posterior"):
        model.estimate()
    drawing = trained("cartpole-arm")
    with pytest.raises(murmurate.Refusal, match="at random even when greedy"):
        drawing.export(tmp_path / "policy.pt2")
    assert list(tmp_path.iterdir()) == []


def test_evaluate_is_murmurate_eval(trained: MakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    model = trained("cartpole-a2c")
    figures = model.evaluate(3, seed=4)
    assert main(["eval", str(model.folder), "--episodes", "3", "--seed", "4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert figures["returns"] == printed["returns"]
    assert len(figures["returns"]) == 3
    assert model.evaluate(np.int64(3), seed=np.int64(4)) == figures  # type: ignore[arg-type]
    assert main(["eval", str(model.folder), "--episodes", "3", "--seed", "4", "--sample", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    sampled = model.evaluate(3, seed=4, sample=True)
    assert sampled["returns"] == printed["returns"] != figures["returns"]
    assert sampled["eval_sampled_return_mean"] == printed["eval_sampled_return_mean"]


@pytest.mark.parametrize(("episodes", "seed"), [(1.5, None), ("3", None), (3, "4"), (3, 0.5)])
def test_numbers_that_are_no_integers_are_refused(episodes: Any, seed: Any, trained: MakeModel) -> None:
    with pytest.raises(murmurate.Refusal, match=r"(episodes|seed) is .*; it must be int or None"):
        trained("cartpole-a2c").evaluate(episodes, seed)


def test_evaluate_is_of_the_model_that_acts(
    trained: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the folder's newest checkpoint, which a resumed run replaces."""
    folder = trained("cartpole-a2c").folder
    monkeypatch.chdir(folder.parent)
    model = murmurate.load(folder.name)
    monkeypatch.chdir(tmp_path)
    parameters = list(model.module.parameters())
    (bias,) = (values for values in parameters if values.shape == (2,))  # of the policy's head
    returns = []
    with torch.no_grad():
        for pushed in (0, 1):
            for values in parameters:
                values.zero_()
            bias[pushed] = 1.0
            assert model.act(np.zeros(4)) == pushed
            returns.append(model.evaluate(10, seed=1)["returns"])
    assert returns[0] != returns[1]


def test_the_callers_number_of_torch_threads_is_kept(trained: MakeModel, tmp_path: Path) -> None:
    folder = trained("cartpole-a2c").folder
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        model = murmurate.load(folder)
        assert torch.get_num_threads() == 3
        model.evaluate(1, seed=1)
        assert torch.get_num_threads() == 3
        options: dict[str, Any] = {"launcher": "inline", "eval_episodes": 1, "quiet": True}
        murmurate.train("cartpole-a2c", updates=2, out=tmp_path / "run", **options)
        assert torch.get_num_threads() == 3
        murmurate.resume(tmp_path / "run", updates=4, quiet=True)
        assert torch.get_num_threads() == 3
        murmurate.simulate("cartpole-a2c", updates=2, out=tmp_path / "simulated", eval_episodes=1, quiet=True)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_denormals_count_for_the_caller_after_a_run_that_flushed_them(tmp_path: Path) -> None:
    torch.set_flush_denormal(False)  # another test may have left it on
    options: dict[str, Any] = {"updates": 2, "eval_episodes": 1, "quiet": True}
    murmurate.train("cartpole-a2c", launcher="inline", out=tmp_path / "run", **options)
    assert sys.float_info.min / 2 > 0.0
    murmurate.simulate("cartpole-a2c", out=tmp_path / "simulated", **options)
    assert sys.float_info.min / 2 > 0.0
    torch.set_flush_denormal(True)
    try:
        murmurate.load(tmp_path / "run")
        assert sys.float_info.min / 2 == 0.0
    finally:
        torch.set_flush_denormal(False)


def test_initial_values_with_another_normalization_say_so(trained: MakeModel, tmp_path: Path) -> None:
    folder = trained("cartpole-a2c").folder
    options: dict[str, Any] = {"updates": 2, "launcher": "inline", "out": tmp_path / "run"}
    with pytest.raises(murmurate.Refusal, match=r"--agent.normalize-observations false, as that run did"):
        murmurate.train(
            "cartpole-a2c", initial=str(folder), agent={"normalize_observations": True}, **options
        )


def test_the_command_exports(trained: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, target = str(trained("cartpole-a2c").folder), tmp_path / "weights.safetensors"
    assert main(["export", folder, "--to", str(target), "--csv", str(tmp_path / "r.csv"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["path"] == str(target)
    assert written["csv"]["rows"] == len((tmp_path / "r.csv").read_text().splitlines()) - 1
    assert main(["export", folder, "--to", str(tmp_path / "p.pt2")]) == 0
    assert "(observation) to (action, logits, value)" in capsys.readouterr().out
    assert main(["export", folder]) == 2
    assert "Say what to write" in capsys.readouterr().err
    assert main(["export", folder, "--csv", str(tmp_path / "t"), "--parquet", str(tmp_path / "t")]) == 2
    assert "name the same file twice" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()
