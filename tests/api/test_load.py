"""``murmurate.load``: acting, evaluating, exporting."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from made_models import MakeModel
from safetensors.torch import load_file

import murmurate
from murmurate.api.export import export_weights, largest_error
from murmurate.cli.main import main
from murmurate.errors import RunFailed
from murmurate.training.restore import load_agent


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
