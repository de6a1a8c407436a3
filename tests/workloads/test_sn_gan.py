"""SN-GAN: what its two updates do, that replicas agree, and runs that are killed, resumed and evaluated."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laws.problems import same
from murmurate.cli.main import main
from murmurate.datasets.image_fashion import FashionWorld
from murmurate.datasets.image_set import ImageBatch
from murmurate.errors import Refusal
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.launch import launcher
from murmurate.recipes import recipe
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context
from murmurate.replicator.replicator import Replicator
from murmurate.spec import Batch, EnvSpec
from murmurate.strategies.all_reduce import AllReduce
from murmurate.strategies.gala import GALA
from murmurate.training.members import group_opener
from murmurate.training.memory import planned_bytes
from murmurate.training.restore import load_agent
from murmurate.training.run_folder import read_run
from murmurate.workloads.sn_gan import SNGAN, SNGANLearner, to_pixels, to_values
from pictures import drawn, write_fashion

SPEC = EnvSpec("squares", (1, 8, 8), torch.uint8, actions=3, examples=60)
SMALL = SNGAN(batch=6, channels=8, latent=4, precision="float32")


def images(count: int = 6, seed: int = 0) -> Batch:
    labels = np.arange(count, dtype=np.int64) % 3
    return Batch(ImageBatch.of(drawn(count, 8, 8, 1, seed=seed), labels), env_steps=count)


def learner_of(config: SNGAN = SMALL, rank: int = 0) -> SNGANLearner:
    return config.build(Context(SPEC, Replica, seed=5, rank=rank))


def vectors(learner: SNGANLearner) -> dict[str, torch.Tensor]:
    return {name: replica.params.detach().clone() for name, replica in learner.replicas.items()}


def changed(learner: SNGANLearner, batch: Batch) -> set[str]:
    before = vectors(learner)
    learner.learn(batch)
    return {name for name, x in vectors(learner).items() if not torch.equal(x, before[name])}


def test_each_loss_moves_its_own_replica_in_the_ratio_of_updates() -> None:
    learner = learner_of(dataclasses.replace(SMALL, discriminator_steps=3))
    moved = [changed(learner, images(seed=seed)) for seed in range(6)]
    assert moved == [{"discriminator"}, {"discriminator"}, {"discriminator", "generator"}] * 2
    clocks = {name: replica.clock for name, replica in learner.replicas.items()}
    assert clocks == {"generator": 2, "discriminator": 6}
    for replica in learner.replicas.values():
        replica.check()


def test_sums_over_features_are_in_float32() -> None:
    net, images_of_block = learner_of(SMALL).discriminator, list[torch.Tensor]()
    net.blocks[-1].register_forward_hook(lambda block, inputs, output: images_of_block.append(output))
    image, label = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        score = net(image, label)
    features = torch.relu(images_of_block[0]).float().sum((2, 3))
    with torch.no_grad():
        expected = net.score(features)[:, 0] + (net.classes(label) * features).sum(1)
    assert images_of_block[0].dtype == torch.bfloat16
    torch.testing.assert_close(score, expected)


def test_scores_of_real_and_generated_images_part() -> None:
    learner = learner_of(dataclasses.replace(SMALL, discriminator_rate=2e-3, discriminator_steps=1000))
    batch = Batch(ImageBatch.of(np.full((6, 8, 8, 1), 250, np.uint8), np.arange(6) % 3))
    first = learner.learn(batch).read_metrics()
    for _ in range(60):
        last = learner.learn(batch).read_metrics()
    assert float(last["loss"]) < 0.5 < float(first["loss"])
    assert float(last["real_score"]) > float(last["fake_score"]) + 1.0


def test_the_generator_learns_the_only_grey_level_there_is() -> None:
    config = dataclasses.replace(SMALL, generator_rate=1e-2, discriminator_rate=1e-2, average_decay=0.9)
    learner = learner_of(config)
    batch = Batch(ImageBatch.of(np.full((6, 8, 8, 1), 200, np.uint8), np.arange(6) % 3))
    label, generator = torch.arange(30) % 3, torch.Generator().manual_seed(0)
    before = learner.sampler()(label, generator).float()
    for _ in range(120):
        learner.learn(batch)
    after = learner.sampler()(label, generator).float()
    assert (before - 200).abs().mean() > 50
    assert (after - 200).abs().mean() < 20


def test_the_average_follows_the_generator_and_is_what_samples_come_from() -> None:
    learner = learner_of(dataclasses.replace(SMALL, generator_rate=1e-2, average_decay=0.5))
    expected = {name: x.detach().clone() for name, x in learner.generator.net.named_parameters()}
    for update in range(1, 4):
        learner.learn(images(seed=update))
        decay = min(0.5, (1 + update) / (10 + update))
        for name, x in learner.generator.net.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * x.detach()
    for name, x in expected.items():
        torch.testing.assert_close(learner.generator.average.get_buffer(name), x)
    with torch.no_grad():
        learner.generator.net.last.layer.bias += 3.0  # samples do not see it
        one = learner.sampler()(torch.zeros(4, dtype=torch.int64), torch.Generator().manual_seed(1))
        learner.generator.average.last.layer.bias += 3.0
        other = learner.sampler()(torch.zeros(4, dtype=torch.int64), torch.Generator().manual_seed(1))
    assert one.float().mean() + 50 < other.float().mean()


def test_noise_is_the_replicas_own_and_follows_from_the_seed() -> None:
    def after(rank: int, global_seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(global_seed)
        learner = learner_of(rank=rank)
        learner.learn(images())
        return vectors(learner)

    assert same(after(0, 0), after(0, 1))
    assert not same(after(0, 0), after(1, 0))


def test_pixels_survive_the_way_to_values_and_back() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    values = to_values(pixels, torch.Generator().manual_seed(0))
    assert values.min() >= -1
    assert values.max() < 1
    assert torch.equal(to_pixels(values), pixels)


def together(
    config: SNGAN, replicas: int, updates: int, strategy: Any = None
) -> list[tuple[dict[str, torch.Tensor], SNGANLearner]]:
    """Vectors and learners of replicas on a simulated fabric, each with batches of its own."""
    strategy = AllReduce() if strategy is None else strategy
    run = dataclasses.replace(recipe("fashion-sn-gan"), strategy=strategy, replicas=replicas)
    fabric = SimulatedFabric(replicas, seed=0, keep_log=False, coroutines="threads")

    def role(rank: int, member: Any) -> Any:
        open_group = group_opener(run, member, range(replicas))
        replicate = Replicator(strategy, member).replicate
        averaged = replicas if isinstance(strategy, AllReduce) else 1
        learner = config.build(
            Context(SPEC, replicate, 5, averaged=averaged, open_group=open_group, rank=rank)
        )
        for update in range(updates):
            learner.learn(images(seed=10 * update + rank))
        return vectors(learner), learner

    return fabric.run([lambda m, r=r: role(r, m) for r in range(replicas)])  # type: ignore[misc]


@pytest.mark.parametrize("batch_norm", ["auto", "local"])
def test_replicas_and_their_singular_vectors_stay_equal_under_all_reduce(batch_norm: Any) -> None:
    results = together(dataclasses.replace(SMALL, batch_norm=batch_norm), 3, 3)
    (first, leader), *others = results
    for vector, learner in others:
        assert same(vector, first)
        # buffers too: the estimates of singular vectors and the moving average
        for module, own in (
            (leader.generator, learner.generator),
            (leader.discriminator, learner.discriminator),
        ):
            for x, y in zip(module.buffers(), own.buffers(), strict=True):
                assert torch.equal(x, y)
    assert all(norm.gather is None for norm in leader.generator.net.norms) == (batch_norm == "local")


def test_batch_statistics_over_replicas_differ_from_local_ones() -> None:
    runs = [together(dataclasses.replace(SMALL, batch_norm=kind), 2, 2) for kind in ("replicas", "local")]
    assert not same(runs[0][0][0], runs[1][0][0])


def test_replicas_that_do_not_wait_have_local_statistics_or_are_refused() -> None:
    (_, learner), _ = together(SMALL, 2, 1, GALA())
    assert all(norm.gather is None for norm in learner.generator.net.norms)
    with pytest.raises(Refusal, match="collectives among its replicas"):
        together(dataclasses.replace(SMALL, batch_norm="replicas"), 2, 1, GALA())


def test_sides_that_do_not_fit_are_refused() -> None:
    spec = dataclasses.replace(SPEC, observation_shape=(1, 9, 9))
    with pytest.raises(ValueError, match="9 x 9 pixels"):
        SMALL.build(Context(spec, Replica, seed=0))
    with pytest.raises(ValueError, match="with classes"):
        SMALL.build(Context(dataclasses.replace(SPEC, actions=0), Replica, seed=0))


def test_memory_is_counted_before_it_is_taken(tmp_path: Path) -> None:
    run = recipe("fashion-sn-gan")
    world = FashionWorld(write_fashion(tmp_path))
    wide = dataclasses.replace(run.learner, channels=20_000)
    planned = planned_bytes(dataclasses.replace(run, world=world, learner=wide))
    assert planned is not None
    assert planned > 60 * 2**30


# -- whole runs -------------------------------------------------------------------------------------

OPTIONS = ("--agent.channels", 4, "--agent.batch", 4, "--agent.precision", "float32", "--samples", 20)


def murmurate(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_fashion(tmp_path)


def trained(data: str, folder: Path, *words: object) -> dict[str, Any]:
    common = ("train", "fashion-sn-gan", "--world.path", data, *OPTIONS, "--launcher", "inline")
    assert murmurate(*common, *words, "--out", folder) == 0
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    learner = load_agent(read_run(folder, recipe), folder / "checkpoints" / "last")
    return {
        f"{name}.{key}": x
        for name, replica in learner.replicas.items()
        for key, x in replica.module.state_dict().items()
    }


def test_resumed_equals_uninterrupted(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--replicas", 2, "--agent.discriminator-steps", 2)
    trained(data, tmp_path / "whole", *words, "--updates", 7)
    assert trained(data, tmp_path / "parts", *words, "--updates", 3)["resume_exact"]
    assert murmurate("resume", tmp_path / "parts", "--updates", 7) == 0
    whole, parts = state_of(tmp_path / "whole"), state_of(tmp_path / "parts")
    assert "generator.average.last.layer.weight" in whole
    assert whole.keys() == parts.keys()
    assert all(torch.equal(x, parts[name]) for name, x in whole.items())
    capsys.readouterr()
    assert murmurate("eval", tmp_path / "parts", "--json", "--episodes", 30) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["samples"] == 30
    assert figures["frechet_distance"] > 0
    assert murmurate("report", tmp_path / "parts") == 0
    assert "<h2>Samples</h2>" in (tmp_path / "parts" / "report.html").read_text()


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("gala", "elastic", "parameter-server", "dpsgd", "local-sgd", "pull-gossip")
]


@pytest.mark.parametrize("strategy", ["hogwild", *SLOW])
def test_it_runs_under_any_strategy(data: str, tmp_path: Path, strategy: str) -> None:
    words = ("--replicas", 2, "--strategy", strategy, "--updates", 12)
    summary = trained(data, tmp_path / "run", *words)
    assert summary["exit"] == "finished"
    assert np.isfinite(summary["frechet_distance"])
    assert launcher("inline").name == summary["launcher"]
