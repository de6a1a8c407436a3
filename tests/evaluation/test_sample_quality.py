"""Frechet distance and class score against their formulas, and the evaluation on small images."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from torch import Tensor

from murmurate.datasets.image_fashion import FashionWorld
from murmurate.errors import Refusal
from murmurate.evaluation.interface import EvalContext
from murmurate.evaluation.sample_quality import SampleQuality, class_score, frechet_distance, write_grid
from murmurate.recipes import recipe
from pictures import write_fashion


def drawn(rows: int, mean: list[float], root: Tensor, seed: int) -> Tensor:
    """Rows whose sample mean and covariance are exactly ``mean`` and root root'."""
    x = torch.randn(rows, len(mean), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x - x.mean(0)
    white = x @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(x.T))).T
    return white @ root.T + torch.tensor(mean, dtype=torch.float64)


def diagonal(*deviations: float) -> Tensor:
    return torch.diag(torch.tensor(deviations, dtype=torch.float64))


@pytest.mark.parametrize(
    ("mean", "deviations", "expected"),
    [
        ([0.0, 0.0], (1.0, 1.0), 0.0),
        ([3.0, 4.0], (1.0, 1.0), 25.0),
        ([0.0, 0.0], (3.0, 1.0), 4.0),  # (3 - 1)^2
        ([1.0, 0.0], (2.0, 0.5), 1 + 1 + 0.25),
        ([0.0, 0.0], (0.0, 0.0), 2.0),  # no spread at all
    ],
)
def test_the_distance_of_gaussians_with_diagonal_covariances(mean, deviations, expected):
    one = drawn(50, [0.0, 0.0], diagonal(1.0, 1.0), 0)
    other = drawn(80, mean, diagonal(*deviations), 1)
    assert frechet_distance(one, other) == pytest.approx(expected, abs=1e-9)
    assert frechet_distance(other, one) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows", [40, 6])
def test_the_distance_is_that_with_scipys_root(seed, rows):
    """Heusel et al. 2017, eq. 6, as published code computes it; 6 rows: covariances without full rank."""
    linalg = pytest.importorskip("scipy.linalg")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    y = torch.randn(rows + 5, 8, generator=generator, dtype=torch.float64) @ torch.randn(
        8, 8, generator=generator, dtype=torch.float64
    )
    c_x, c_y = np.cov(x.numpy().T), np.cov(y.numpy().T)
    # singular covariances: the limit, as pytorch-fid takes it
    root = linalg.sqrtm((c_x + 1e-10 * np.eye(8)) @ (c_y + 1e-10 * np.eye(8)))
    expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(c_x + c_y - 2 * np.real(root))
    assert frechet_distance(x, y) == pytest.approx(float(expected), rel=1e-4)


def test_class_scores():
    certain = torch.eye(4, dtype=torch.float64).repeat(3, 1).clamp(min=1e-300).log()
    assert class_score(certain) == pytest.approx(4)
    assert class_score(certain[:1].repeat(9, 1)) == pytest.approx(1)
    assert class_score(torch.full((7, 4), 0.25, dtype=torch.float64).log()) == pytest.approx(1)
    p = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64)
    kl = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert class_score(p.log()) == pytest.approx(math.exp(kl))


def brightness(label: Tensor) -> Tensor:
    return (20 * label + 10).to(torch.uint8)[:, None, None, None]


class Shades:
    """In place of a learner: images of class k have the one grey level 20 k + 10."""

    def sampler(self) -> Any:
        return lambda label, generator: brightness(label).expand(-1, 1, 28, 28)


def test_a_grid_has_a_row_for_each_class(tmp_path: Path) -> None:
    write_grid(Shades().sampler(), 3, torch.Generator(), tmp_path / "grid.png")
    pixels = np.rint(matplotlib.image.imread(tmp_path / "grid.png") * 255)
    side = 3 * 28 + 2  # three times as large, between white lines
    assert pixels.shape[:2] == (3 * side, 10 * side)
    assert [pixels[row * side + side // 2, 5 * side + 9, 0] for row in range(3)] == [10, 30, 50]
    assert pixels[0, 0, 0] == 255


@pytest.fixture
def context(tmp_path: Path) -> EvalContext:
    (tmp_path / "run").mkdir()
    world = FashionWorld(write_fashion(tmp_path, train=60, test=20))
    return EvalContext(world, tmp_path / "run", 0, world.fingerprint())


def test_the_classifier_is_trained_once_and_kept(context: EvalContext) -> None:
    evaluation = SampleQuality(samples=40)
    figures = evaluation.evaluate(Shades(), context)
    file = context.folder / "feature-net.safetensors"
    written = file.stat().st_mtime_ns, file.read_bytes()
    assert evaluation.evaluate(Shades(), context) == figures
    assert (file.stat().st_mtime_ns, file.read_bytes()) == written
    other_images = dict(context.fingerprint or {}) | {"digest": "other"}
    evaluation.evaluate(Shades(), dataclasses.replace(context, fingerprint=other_images))
    assert file.stat().st_mtime_ns > written[0], "a classifier of other images is not used"
    file.write_bytes(b"damaged")
    assert evaluation.evaluate(Shades(), context) == figures, "it is the same one again"
    json.dumps(figures)
    assert figures["samples"] == 40
    assert figures["frechet_distance"] > figures["frechet_distance_test"] > 0
    assert "our own classifier" in evaluation.sentence(figures)
    ((title, html),) = evaluation.sections(context.folder)
    assert title == "Samples"
    assert "data:image/png;base64," in html
    assert evaluation.sections(context.folder / "none") == []


def test_a_classifier_is_shared_by_its_file(context: EvalContext, tmp_path: Path) -> None:
    shared = SampleQuality(samples=40, feature_net=str(tmp_path / "net"))
    figures = shared.evaluate(Shades(), context)
    assert not (context.folder / "feature-net.safetensors").exists()
    other = dataclasses.replace(context, folder=tmp_path)
    assert shared.evaluate(Shades(), other) == figures
    written = (tmp_path / "net").read_bytes()
    split_otherwise = dataclasses.replace(context.world, validation=0.5, split_seed=7)  # type: ignore[type-var]
    shared.evaluate(Shades(), dataclasses.replace(context, world=split_otherwise))
    assert (tmp_path / "net").read_bytes() != written, "its test images may be those that it learned"
    SampleQuality(40, feature_net=str(tmp_path / "new" / "folder" / "net")).evaluate(Shades(), context)
    assert (tmp_path / "new" / "folder" / "net").exists()
    with pytest.raises(Refusal, match=r"cannot be written.*--feature-net"):
        SampleQuality(40, feature_net=str(tmp_path / "net" / "below")).evaluate(Shades(), context)


@pytest.mark.parametrize("content", [b"", b"a data set", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_file_of_another_kind_is_not_overwritten(
    content: bytes, context: EvalContext, tmp_path: Path
) -> None:
    (tmp_path / "images.npz").write_bytes(content)
    evaluation = SampleQuality(40, feature_net=str(tmp_path / "images.npz"))
    refusal = r"images\.npz \(--feature-net\) is something else.*Move it elsewhere"
    with pytest.raises(Refusal, match=refusal):
        evaluation.evaluate(Shades(), context)
    with pytest.raises(Refusal, match=refusal):  # before any update
        dataclasses.replace(recipe("fashion-sn-gan"), evaluation=evaluation).validate()
    assert (tmp_path / "images.npz").read_bytes() == content


def test_a_sentence_does_not_call_images_for_validation_test_images() -> None:
    figures = {"frechet_distance": 3.0, "frechet_distance_test": None, "samples": 40}
    sentence = SampleQuality().sentence({**figures, "class_score": 2.0, "feature_net_accuracy": 0.9})
    assert SampleQuality().sentence({**figures, "class_score": None}) == ""
    assert sentence.endswith("by features of our own classifier, which has 90.0% of held-out images right")


def test_two_samples_are_the_least(context: EvalContext) -> None:
    with pytest.raises(Refusal, match="samples is 1"):
        SampleQuality().evaluate(Shades(), dataclasses.replace(context, count=1))
    assert SampleQuality().evaluate(Shades(), dataclasses.replace(context, count=2))["samples"] == 2
