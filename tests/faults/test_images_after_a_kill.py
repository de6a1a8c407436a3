"""Replicas that learn from images and are killed in the middle of a pass: which images are learned from."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmurate.cli.main import main
from murmurate.training import checkpoint
from pictures import drawn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SHARE, BATCH = 23, 4  # images of a pass of each of two replicas, and of an update
# Each image has a label of its own. A replica notes after each update its number and the images, and kills
# itself before one as soon as DEATH holds.
RECIPE = """
import dataclasses
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from murmurate import recipes
from murmurate.workloads.image_classifier import ClassifierLearner, ImageClassifier

HERE, ALGORITHM, WORLDS = Path(__file__).parent, Path(__file__).stem, ("arrays",)


@dataclass(frozen=True)
class Noted(ImageClassifier):
    name: ClassVar[str] = ALGORITHM

    def build(self, context):
        return NotingLearner(self, context)


def saved_within_a_pass():
    try:
        saved = json.loads((HERE / "run/checkpoints/last/state.json").read_text())
    except FileNotFoundError:
        return False
    return all(images % SHARE for images in saved["replica_env_steps"])


class NotingLearner(ClassifierLearner):
    def learn(self, batch):
        if (HERE / "kill").exists() and DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = super().learn(batch)
        with (HERE / f"learned-{self.rank}").open("a") as file:
            file.write(json.dumps([self.clock, batch.data.labels.tolist()]) + "\\n")
        return outcome


def recipe(world):
    run = recipes.recipe("arrays-resnet20")
    learner = Noted(width=1, batch=BATCH, schedule="constant", validate_every=0)
    world = dataclasses.replace(run.world, path=str(HERE / "images.npz"), validation=0, test=0)
    return dataclasses.replace(run, recipe=f"arrays-{ALGORITHM}", world=world, learner=learner, replicas=2)
"""


def killed(folder: Path, death: str, *options: object) -> int:
    """Train in ``folder`` until replicas are killed, or to the end; returns the exit code."""
    np.savez(folder / "images.npz", images=drawn(2 * SHARE, 8, 8, 3), labels=np.arange(2 * SHARE))
    text = RECIPE.replace("DEATH", death).replace("SHARE", str(SHARE)).replace("BATCH", str(BATCH))
    file = folder / f"{folder.name}.py"  # one process imports the files of all tests
    file.write_text(text)
    (folder / "kill").touch()
    words = ("train", file, "--env-steps", "none", "--out", folder / "run", *options)
    code = main([str(word) for word in words])
    (folder / "kill").unlink()
    return code


def updates(folder: Path) -> list[int]:
    """The number of updates of each replica that the newest checkpoint counts."""
    saved = checkpoint.read_manifest(checkpoint.newest(folder / "run" / "checkpoints"))
    return [images // BATCH for images in saved["replica_env_steps"]]


def notes(folder: Path, rank: int) -> list[tuple[int, list[int]]]:
    return [tuple(json.loads(line)) for line in (folder / f"learned-{rank}").read_text().splitlines()]


def passes(folder: Path, rank: int) -> list[list[int]]:
    """The images of each pass of a replica; of an update that was made again after a resume, the last."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for update, images in sorted(dict(notes(folder, rank)).items()):
        for place, image in enumerate(images, BATCH * (update - 1)):
            found[place // SHARE].append(image)
    assert all(len(set(images)) == len(images) for images in found.values()), "none is seen twice"
    return [found[k] for k in range(max(found) + 1)]


def whole(*parts: list[int]) -> bool:
    return sorted(itertools.chain(*parts)) == list(range(2 * SHARE))


def resumed(folder: Path, end: int) -> dict[str, Any]:
    assert main(["resume", str(folder / "run"), "--updates", str(end)]) == 0
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary


def test_after_a_resume_every_image_of_a_pass_is_learned_from_once(tmp_path: Path) -> None:
    often = ("--checkpoint-every-env-steps", 6 * BATCH)
    assert killed(tmp_path, "saved_within_a_pass()", "--updates", 4000, *often) == 1
    saved = updates(tmp_path)
    noted = [len(notes(tmp_path, rank)) for rank in range(2)]
    assert all(0 < at < made for at, made in zip(saved, noted, strict=True))
    end = max(saved) + 2 * SHARE // BATCH
    assert resumed(tmp_path, end)["resume_exact"]
    for rank in range(2):
        assert notes(tmp_path, rank)[noted[rank]][0] == saved[rank] + 1, "it goes on after the checkpoint"
    one, other = passes(tmp_path, 0), passes(tmp_path, 1)
    assert len(one) == len(other) > saved[0] * BATCH // SHARE + 2
    assert all(map(whole, one[:-1], other[:-1]))


def test_under_gossip_the_images_of_a_dead_replica_are_left_out_until_a_resume(tmp_path: Path) -> None:
    end = 2 * SHARE // BATCH + 1
    gossip = ("--strategy", "pull-gossip", "--updates", end)
    assert killed(tmp_path, "self.rank == 1 and self.clock == 5", *gossip) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["dead_replicas"] == [1]
    one, other = passes(tmp_path, 0), passes(tmp_path, 1)
    assert [len(images) for images in one] == [SHARE, SHARE, BATCH * end - 2 * SHARE]
    assert [len(images) for images in other] == [5 * BATCH]
    assert not set(one[0]) & set(other[0])

    # it goes on at the place of the survivor, so that only the beginning of that pass is left out
    assert resumed(tmp_path, end=4 * SHARE // BATCH)["dead_replicas"] == []
    one, other = passes(tmp_path, 0), passes(tmp_path, 1)
    assert [len(images) for images in other] == [5 * BATCH, 0, 3 * SHARE - BATCH * end, SHARE]
    assert not set(one[2]) & set(other[2])
    assert whole(one[3], other[3])
