"""Runs that start from the parameters of another run."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmurate.agents.d4pg import D4PG
from murmurate.agents.sac import SAC
from murmurate.cli.main import main
from murmurate.cli.options import change
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.recipes import recipe
from murmurate.record.stored import write_json
from murmurate.replica.state_dict import state_of, tensors_of
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.replicator.replicator import Replicator
from murmurate.spec import EnvSpec
from murmurate.strategies.all_reduce import AllReduce
from murmurate.training.checkpoint import read_manifest
from murmurate.training.restore import consensus, initial_values, run_folder, warn_of_other_classes
from murmurate.training.run import Run
from short_runs import SHORT, refused, resume, train

_STRATEGIES = ["gala", "push-sum", "elastic", "synchronous-elastic", "parameter-server", "dpsgd", "hogwild"]
_AGENTS = ["cartpole-dqn", "cartpole-arm", "pendulum-td3", "pendulum-sac", "pendulum-d4pg", "pendulum-ddpg"]


def short(name: str, *options: str) -> Run:
    run: Run = change(recipe(name), [*SHORT, *options], "murmurate train")
    return run


def values(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    last = folder / "checkpoints" / "last"
    return consensus(last, int(read_manifest(last)["replicas"]))


def check_same(
    found: dict[str, dict[str, torch.Tensor]], expected: dict[str, dict[str, torch.Tensor]]
) -> None:
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        for key, value in tensors.items():
            torch.testing.assert_close(found[name][key], value, rtol=1e-6, atol=1e-7, msg=f"{name}, {key}")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("initial") / "source"
    train(short("cartpole-a2c", "--seed", "5", "--agent.normalize-observations", "true"), folder)
    return folder


@pytest.mark.parametrize("strategy", ["all-reduce", *_STRATEGIES])
def test_it_starts_from_the_other_runs_consensus(strategy: str, source: Path, tmp_path: Path) -> None:
    """With a learning rate of 0 the parameters stay what they were at the start, at a centre too."""
    run = short("cartpole-a2c", "--initial", str(source), "--agent.learning-rate", "0", "--replicas", "2")
    run = change(run, ["--agent.normalize-observations", "true"], "murmurate train")
    if strategy == "hogwild":
        run = dataclasses.replace(run, launcher="local")
    run = change(_with_strategy(run, strategy), [], "murmurate train")
    train(run, tmp_path / "run")
    found, expected = values(tmp_path / "run"), values(source)
    statistics = [key for key in expected["a2c"] if "normalizer" in key]
    assert statistics, "running statistics are buffers of the module"
    for tensors in (found, expected):
        for key in statistics:  # they have gone on
            assert torch.isfinite(tensors["a2c"].pop(key)).all()
    check_same(found, expected)


def test_it_starts_from_a_checkpoint_that_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best one, whose parameters are others here than those of the run's last."""
    copied = tmp_path / "copied"
    shutil.copytree(source, copied)
    other = short("cartpole-a2c", "--seed", "6", "--agent.normalize-observations", "true")
    train(other, tmp_path / "other")
    best = copied / "checkpoints" / "best"
    shutil.rmtree(best, ignore_errors=True)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "last", best)
    run = dataclasses.replace(other, initial=str(best))
    found, expected = initial_values(run), values(tmp_path / "other")
    check_same(found, expected)
    weight = "policy_head.weight"
    assert not torch.equal(found["a2c"][weight], values(source)["a2c"][weight])

    (best / "replica-0.safetensors").write_bytes(b"")
    capsys.readouterr()
    command = ["train", "cartpole-a2c", *SHORT, "--out", tmp_path / "run", "--initial"]
    assert "replica-0.safetensors is corrupt" in refused(capsys, *command, best)


def _with_strategy(run: Run, name: str) -> Run:
    from murmurate.strategies import strategy

    return dataclasses.replace(run, strategy=strategy(name)())


@pytest.mark.parametrize("name", _AGENTS)
def test_target_networks_start_there_too(name: str) -> None:
    run = short(name)
    spec = run.world.spec()
    other: Any = run.learner.build(Context(spec, Replica, seed=7))
    initial = {}
    for key, replica in other.replicas.items():
        state = state_of(replica)
        initial[key] = {**state["params"], **state["buffers"]}

    def build(member: Any) -> Any:
        replicator = Replicator(AllReduce(), member, initial=initial)
        return run.learner.build(Context(spec, replicator.replicate, seed=1))

    (built,) = SimulatedFabric(1, seed=0).run([build])
    for key, replica in built.replicas.items():
        torch.testing.assert_close(replica.params, other.replicas[key].params)
    ours, theirs = _targets(built), _targets(other)
    assert ours, f"{name} has target networks"
    for one, another in zip(ours, theirs, strict=True):
        for (key, x), y in zip(one.net.state_dict().items(), another.net.state_dict().values(), strict=True):
            torch.testing.assert_close(x, y, msg=key)


@pytest.mark.parametrize("config", [SAC(hidden=4), D4PG(hidden=4, v_min=0.0, v_max=500.0)])
def test_bounds_of_actions_and_of_returns_are_the_new_runs(config: Any) -> None:
    """Of a world of the same shapes, and of settings that may be others."""

    def spec(bound: float) -> EnvSpec:
        return EnvSpec("steering", (3,), torch.float32, 0, (2,), (-bound, -bound), (bound, bound))

    other = type(config)(hidden=4).build(Context(spec(1.0), Replica, seed=7))
    initial = {name: tensors_of(replica) for name, replica in other.replicas.items()}

    def build(member: Any) -> Any:
        replicator = Replicator(AllReduce(), member, initial=initial)
        return config.build(Context(spec(3.0), replicator.replicate, seed=1))

    (built,) = SimulatedFabric(1, seed=0).run([build])
    policy = built.replicas["policy"].module
    torch.testing.assert_close(built.replicas["policy"].params, other.replicas["policy"].params)
    torch.testing.assert_close(policy.bounds.to_world(torch.ones(1, 2)), torch.full((1, 2), 3.0))
    if isinstance(config, D4PG):
        assert built.critic.support[[0, -1]].tolist() == [0.0, 500.0]


def _targets(agent: Any) -> list[Any]:
    agent = getattr(agent, "core", agent)
    several = getattr(agent, "targets", None) or getattr(agent, "_targets", None)
    return list(several or [agent.target])


def test_statistics_of_observations_start_there_too(source: Path, tmp_path: Path) -> None:
    run = short("cartpole-a2c", "--initial", str(source), "--agent.normalize-observations", "true")
    train(run, tmp_path / "run")
    (key,) = (key for key in values(source)["a2c"] if key.endswith("count"))
    before, after = (float(values(folder)["a2c"][key]) for folder in (source, tmp_path / "run"))
    assert after == pytest.approx(2 * before)


def test_a_resume_does_not_read_it_again(source: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(source, copied)
    run = short("cartpole-a2c", "--initial", str(copied), "--agent.normalize-observations", "true")
    train(run, tmp_path / "run")
    shutil.rmtree(copied)
    finish = resume(tmp_path / "run", lambda run: dataclasses.replace(run, updates=4))
    assert finish.summary is not None
    assert (finish.code, finish.summary["updates"]) == (0, 4)


def test_what_does_not_fit_is_refused_before_anything_is_made(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["train", "cartpole-a2c", *SHORT, "--out", out, "--initial"]
    said = refused(capsys, *command, source)
    assert "normalizer.moments.count of 'a2c' is only there" in said
    said = refused(capsys, *command, source, "--agent.normalize-observations", "true", "--agent.hidden", "32")
    assert "the initial values are of another network" in said
    assert "and in this run [32" in said
    said = refused(capsys, "train", "cartpole-ppo", *SHORT, "--out", out, "--initial", source)
    assert "of another learner: they have none for 'ppo', only for 'a2c'" in said
    assert "--initial-except" not in said, "to draw all parameters is no remedy"
    said = refused(capsys, *command, tmp_path / "nowhere")
    assert "nowhere is no folder of a run with checkpoints" in said
    assert not out.exists()


def test_a_classifier_of_other_classes_keeps_all_but_its_last_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = {}
    for classes in (3, 4):
        arrays[classes] = tmp_path / f"{classes}.npz"
        labels = torch.arange(48) % classes
        images = torch.randint(0, 256, (48, 8, 8, 3), generator=torch.Generator().manual_seed(classes))
        np.savez(arrays[classes], x_train=images.to(torch.uint8).numpy(), y_train=labels.numpy())
    command = [
        "train", "arrays-resnet20", "--agent.width", "4", "--agent.batch", "12", "--updates", "2",
        "--agent.learning-rate", "0", "--launcher", "inline", "--world.path",
    ]  # fmt: skip
    assert main([str(part) for part in [*command, arrays[3], "--out", tmp_path / "base"]]) == 0
    capsys.readouterr()
    command += [arrays[4], "--initial", tmp_path / "base", "--out", tmp_path / "run"]
    said = refused(capsys, *command)
    assert "head.weight has shape [3, 16], and in this run [4, 16]" in said
    assert "--initial-except" in said
    said = refused(capsys, *command, "--initial-except", "haed")
    assert "head.weight has shape" in said
    assert "no parameter or buffer here is called haed" in said
    said = refused(capsys, *command, "--initial-except", "head,hat")
    assert "--initial-except hat: no parameter or buffer has that name" in said
    assert not (tmp_path / "run").exists()
    assert main([str(part) for part in [*command, "--initial-except", "head"]]) == 0
    (before,), (after,) = (values(tmp_path / name).values() for name in ("base", "run"))
    for name, tensor in before.items():
        if name.startswith("head."):
            assert after[name].shape[0] == 4
        elif "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(after[name], tensor, msg=name)


def test_what_only_the_other_run_has_may_be_left_out_and_in_a_simulation_too(
    source: Path, tmp_path: Path
) -> None:
    """The other run normalises its observations, and this one does not."""
    words = ["simulate", "cartpole-a2c", *SHORT, "--agent.hidden", "32", "--initial", source]
    words += ["--initial-except", "normalizer,torso,value_torso,policy_head,value_head"]
    assert main([str(word) for word in [*words, "--out", tmp_path / "run"]]) == 0


def test_names_to_leave_out_need_a_run_to_start_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(
        capsys, "train", "cartpole-a2c", *SHORT, "--initial-except", "head", "--out", tmp_path / "run"
    )
    assert "give that run's folder with --initial" in said


def test_other_classes_of_the_same_number_are_noticed(tmp_path: Path, source: Path) -> None:
    """Told by the records of the data sets in the two run folders."""
    folders = [tmp_path / "base", tmp_path / "run"]
    for folder, names in zip(folders, (["cat", "dog"], ["cat", "owl"]), strict=True):
        (folder / "checkpoints" / "best").mkdir(parents=True)
        write_json(folder / "source.json", {"classes": names})
    best = folders[0] / "checkpoints" / "best"
    write_json(best / "state.json", {})
    run = short("cartpole-a2c", "--initial", str(folders[0]))
    for initial in (folders[0], best):
        with pytest.warns(UserWarning, match="trained on other classes \\(dog in place of owl\\)"):
            warn_of_other_classes(dataclasses.replace(run, initial=str(initial)), folders[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_classes(dataclasses.replace(run, initial_except=("head",)), folders[1])
        warn_of_other_classes(run, folders[0])
        # of another number, which the outputs of some models (a GAN's generator) do not depend on
        write_json(folders[1] / "source.json", {"classes": ["cat", "dog", "owl"]})
        warn_of_other_classes(run, folders[1])


def test_a_copied_checkpoint_may_lie_in_the_root_folder() -> None:
    """As where it is mounted into a container."""
    assert run_folder(Path("/best")) == Path("/")
