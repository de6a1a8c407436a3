"""``murmurate.load``: agents with memory or of images, and programs and weights that are exported of them."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from made_models import MakeModel

import murmurate
from murmurate.training.restore import load_agent

PONG: dict[str, Any] = {"simulators": 2, "eval_max_env_steps": 50}
RECURRENT: dict[str, Any] = {
    "simulators": 4, "agent": {"recurrent": 8, "normalize_observations": True, "hidden": 8, "steps": 16},
}  # fmt: skip


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
