"""Runs whose replicas have several parts: equal to whole ones, resumed as whole, with killed parts."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import struct
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.recipes import recipe
from murmurate.record.stored import read_object
from murmurate.replicator.collectives import Group
from murmurate.training.part_processes import LeaderAlone, PartsOfReplica
from sessions import session
from short_runs import refused
from waiting import DEADLINE_SECONDS, until

CLASSIFIER = [
    "fashion-resnet20", "--agent.width", "4", "--agent.batch", "16", "--agent.precision", "float32",
    "--agent.validate-every", "0", "--agent.schedule", "constant", "--record-every-seconds", "0.001",
    "--probe-every-updates", "0", "--world.validation", "0",
]  # fmt: skip


def digits(folder: Path) -> Path:
    """Files in the format of Fashion-MNIST: noise, whose brightness is the label."""
    random = np.random.default_rng(0)
    for name, count in (("train", 256), ("t10k", 32)):
        labels = random.integers(0, 10, count, dtype=np.uint8)
        pixels = (random.integers(0, 40, (count, 28, 28)) + 20 * labels[:, None, None]).astype(np.uint8)
        folder.mkdir(exist_ok=True)
        header = struct.pack(">4i", 2051, count, 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        header = struct.pack(">2i", 2049, count)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    return folder


def losses(folder: Path) -> dict[int, dict[int, float]]:
    """By replica and update."""
    found: dict[int, dict[int, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record.get("loss") is not None:
            found.setdefault(record["replica"], {})[record["updates"]] = record["loss"]
    return found


def arguments(tmp_path: Path, out: str, *more: str) -> list[str]:
    world = ("--world.path", str(digits(tmp_path / "images")))
    return ["train", *CLASSIFIER, *world, "--out", str(tmp_path / out), *more]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "norm", "precision"),
    [
        ("local", "local", "float32"),
        ("inline", "local", "float32"),
        ("inline", "local", "bfloat16"),
        ("local", "replicas", "float32"),
        ("inline", "replicas", "float32"),
        ("inline", "replicas", "bfloat16"),
    ],
)
def test_a_run_in_parts_equals_one_that_is_whole(tmp_path, launcher, norm, precision):
    agent = ("--agent.batch-norm", norm, "--agent.precision", precision)
    ends = ("--replicas", "2", "--updates", "5", "--launcher", launcher, *agent)

    assert main(arguments(tmp_path, "whole", *ends)) == 0
    assert main(arguments(tmp_path, "parts", *ends, "--parts", "2", "2")) == 0

    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert len(whole) == 2
    for rank, of_updates in whole.items():
        for update, loss in of_updates.items():
            assert parts[rank][update] == pytest.approx(loss, rel=5e-3 if precision == "bfloat16" else 5e-4)
    accuracies = [read_object(tmp_path / name / "summary.json")["accuracy"] for name in ("whole", "parts")]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.07)


@pytest.mark.slow
def test_a_whole_run_goes_on_in_parts_and_the_other_way(tmp_path):
    assert main(arguments(tmp_path, "whole", "--updates", "6")) == 0
    assert main(arguments(tmp_path, "run", "--updates", "2")) == 0

    assert main(["resume", str(tmp_path / "run"), "--updates", "4", "--parts", "2"]) == 0
    assert main(["resume", str(tmp_path / "run"), "--updates", "6", "--parts", "1"]) == 0

    expected, found = losses(tmp_path / "whole")[0], losses(tmp_path / "run")[0]
    assert all(found[update] == pytest.approx(expected[update], rel=2e-3) for update in (2, 4, 6))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["local", "replicas"])
def test_a_killed_part_ends_its_replica_by_name_and_the_other_goes_on(tmp_path, norm):
    options = ("--replicas", "2", "--parts", "2", "--updates", "60", "--agent.batch-norm", norm)
    command = arguments(tmp_path, "run", *options)
    words = [sys.executable, "-m", "murmurate", *command]
    with session(words, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        log = tmp_path / "run" / "metrics.jsonl"
        until(lambda: log.exists() and 3 in losses(tmp_path / "run").get(1, {}), "three updates")

        parts = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "murmurate.training.part_process" in " ".join(child.cmdline())
        ]
        assert len(parts) == 2
        os.kill(parts[0].pid, signal.SIGKILL)

        assert process.wait(2 * DEADLINE_SECONDS) == 0
        assert not any(part.is_running() and part.status() != psutil.STATUS_ZOMBIE for part in parts)
    summary = read_object(tmp_path / "run" / "summary.json")
    (dead,) = summary["dead_replicas"]
    assert losses(tmp_path / "run")[1 - dead].keys() >= {60}
    told = [event["message"] for event in summary["events"]]
    assert any(
        re.match(rf"replica {dead} died \(part 1 of replica {dead} died, so part 0 cannot go on.*1 go on", m)
        for m in told
    )


def test_collectives_other_than_those_of_batch_norm_are_refused():
    """They would have no part in the replicas' group but the first of each replica."""
    with pytest.raises(Refusal, match=r"collective of its own \(mean\).* leave out --parts"):
        Group(LeaderAlone()).mean(torch.ones(2))


def test_what_cannot_have_parts_is_refused(tmp_path, capsys):
    out = ("--out", tmp_path / "run")

    told = refused(capsys, "train", "cartpole-a2c", "--parts", "2", *out)
    assert "only images are divided among parts" in told
    told = refused(capsys, "train", "fashion-resnet20", "--parts", "1,0", *out)
    assert "parts" in told
    told = refused(capsys, "train", "fashion-resnet20", "--strategy", "hogwild", "--parts", "2", *out)
    assert "under hogwild other replicas write" in told
    world = ("--world.path", digits(tmp_path / "images"))
    told = refused(capsys, "train", "fashion-sn-gan", "--agent.channels", "4", *world, "--parts", "2", *out)
    assert "sn-gan has 2 optimizers, and --parts needs one: leave out --parts" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_more_parts_than_a_layer_has_rows_are_refused_without_a_traceback(tmp_path, capfd):
    images = np.zeros((8, 4, 16), np.uint8)
    np.savez(tmp_path / "low.npz", images=images, labels=np.arange(8) % 2)
    world = ("--world.path", str(tmp_path / "low.npz"), "--world.test", "0", "--launcher", "inline")
    agent = ("--agent.width", "2", "--agent.batch", "4", "--agent.validate-every", "0", "--updates", "1")

    out = ("--out", str(tmp_path / "run"))
    assert main(["train", "arrays-resnet20", *world, *agent, "--parts", "2", *out]) == 2

    told = capfd.readouterr().err
    assert "2 parts cannot share 1 rows" in told
    assert "Traceback" not in told


def test_replicas_of_parts_have_noise_of_their_own() -> None:
    run = dataclasses.replace(recipe("fashion-resnet20"), parts=(2,), replicas=2)
    memories = [SharedMemoryFile.create() for _ in range(2)]
    parts = [PartsOfReplica(run, rank, 0, memory).parts for rank, memory in enumerate(memories)]
    assert [each.replica for each in parts] == [0, 1]
    assert len({noise.initial_seed() for each in parts for noise in (each.own_noise, each.common_noise)}) == 4
    for memory in memories:
        memory.close()
