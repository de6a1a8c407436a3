"""How good generated images are: Frechet distance and class scores in the features of our own classifier."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from murmurate.datasets.interface import DataSet, ExampleSet
from murmurate.errors import Refusal
from murmurate.evaluation._feature_net import (
    FEATURES,
    FeatureClassifier,
    feature_classifier,
    refuse_other_file,
)
from murmurate.evaluation.interface import Curve, EvalContext, Evaluation
from murmurate.ranges import PositiveInt, Range
from murmurate.spec import derive_generator

GRID = "samples.png"
_MAX_REAL_IMAGES = 10_000  # the most real images with whose features those of samples are compared
_ROWS, _COLUMNS = 10, 10  # of the grid of samples
_LEAST_SIDE = 64  # pixels of an image in the grid; smaller ones are enlarged by a whole factor


@dataclass(frozen=True)
class SampleQuality(Evaluation):
    """Frechet distance (Heusel et al. 2017) and class score (Salimans et al. 2016) of generated images,
    equally many of each class, in the features of a small classifier that the first evaluation trains on the
    data set's training images. So these are not FID and Inception Score, and do not compare with published
    ones.

    The learner gives ``sampler()``: a function of classes [n] and a generator that returns images
    [n, C, H, W] uint8. A grid of samples, a class in each row, is written to ``samples.png``.

    samples: number of generated images. feature_epochs: passes through the images in the classifier's
        training. feature_net: file of the classifier, which runs may share; empty:
        ``feature-net.safetensors`` in the run folder.
    """

    samples: Annotated[int, Range(2)] = 10_000
    feature_epochs: PositiveInt = 2
    feature_net: str = field(default="", metadata={"place": True})

    curves: ClassVar[tuple[Curve, ...]] = (
        Curve(
            "loss",
            "The discriminator's loss",
            "hinge loss of the discriminator",
            "2 where it cannot tell generated images from real ones, 0 where it always can.",
            digits=3,
        ),
    )

    headline: ClassVar[Curve] = Curve(
        "frechet_distance",
        "Frechet distance",
        "Frechet distance of generated from training images",
        "In the features of our own classifier; lower is better.",
        lower_is_better=True,
    )

    def __post_init__(self) -> None:
        if self.feature_net:  # a run may be evaluated from another folder
            object.__setattr__(self, "feature_net", os.path.abspath(self.feature_net))

    def check(self) -> None:
        """Raise Refusal if ``feature_net`` is another kind of file."""
        if self.feature_net:
            refuse_other_file(Path(self.feature_net))

    def evaluate(self, learner: Any, context: EvalContext) -> dict[str, Any]:
        """Distances and scores (docs/algorithms/sn-gan.md). Raises Refusal for fewer than two samples,
        where the classifier's file cannot be written, and where ``feature_net`` is another kind of file."""
        count = self.samples if context.count is None else context.count
        if count < 2:
            raise Refusal(f"samples is {count}; make at least two. Use --episodes 10000.")
        split, spec = cast(DataSet, context.world).divided(), context.world.spec(context.fingerprint)
        path = Path(self.feature_net) if self.feature_net else context.folder / "feature-net.safetensors"
        self.check()
        data = context.world.fingerprint() if context.fingerprint is None else context.fingerprint
        classifier = feature_classifier(path, split, spec, epochs=self.feature_epochs, data=data)
        sampler, generator = learner.sampler(), derive_generator(context.seed, "samples")
        label = torch.arange(count) % spec.actions
        images = sampler(label, generator)
        write_grid(sampler, spec.actions, derive_generator(context.seed, "grid"), context.folder / GRID)
        train, _ = classifier.features(_spaced(split.train).images)
        return {
            **_figures("", classifier, images, label, train),
            **_test_figures(classifier, split.test, train),
            "samples": count,
            "features": FEATURES,
            "feature_net_accuracy": classifier.accuracy,
        }

    def sentence(self, figures: Mapping[str, Any]) -> str:
        if figures.get("frechet_distance") is None or figures.get("class_score") is None:
            return ""
        test, accuracy = figures["frechet_distance_test"], figures["feature_net_accuracy"]
        of_test = "" if test is None else f" (test images: {test:.2f})"
        right = "" if accuracy is None else f", which has {accuracy:.1%} of held-out images right"
        distance, score = figures["frechet_distance"], figures["class_score"]
        return (
            f"Frechet distance of {figures['samples']:,} samples: {distance:.2f}{of_test}, class score "
            f"{score:.2f}. Not FID and Inception Score: by features of our own "
            f"classifier{right}"
        )

    def sections(self, folder: Path) -> list[tuple[str, str]]:
        """The grid of samples."""
        try:
            picture = base64.b64encode((folder / GRID).read_bytes()).decode()
        except OSError:
            return []
        style = "max-width: 100%; image-rendering: pixelated"
        image = f'<img src="data:image/png;base64,{picture}" alt="samples, a class a row" style="{style}">'
        return [("Samples", image)]


def frechet_distance(x: Tensor, y: Tensor) -> float:
    """Squared Frechet distance of the Gaussians with the means and covariances of ``x`` [n, D] and ``y``
    [m, D]: |m_x - m_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2)).

    Source: Heusel et al. 2017, eq. 6. The trace of the root is computed from the eigenvalues of the symmetric
    C_x^(1/2) C_y C_x^(1/2), which are those of C_x C_y. ``x`` and ``y`` need at least two rows each; computed
    in float64.
    """
    x, y = x.double(), y.double()
    c_x, c_y = torch.cov(x.T).reshape(x.shape[1], -1), torch.cov(y.T).reshape(y.shape[1], -1)
    values, vectors = torch.linalg.eigh(c_x)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    root_trace = torch.linalg.eigvalsh(root @ c_y @ root).clamp(min=0).sqrt().sum()
    return float((x.mean(0) - y.mean(0)).square().sum() + c_x.trace() + c_y.trace() - 2 * root_trace)


def class_score(log_p: Tensor) -> float:
    """exp(mean KL(p(y given x) || p(y))), from 1 to the number of classes; log_p: log p(y given x) [n, K].

    Source: Salimans et al. 2016, section 4, there with Inception as classifier. Differs: over all images at
    once, not the mean of ten parts.
    """
    marginal = torch.logsumexp(log_p, 0) - torch.log(torch.tensor(float(len(log_p)), dtype=log_p.dtype))
    return float((log_p.exp() * (log_p - marginal)).sum(1).mean().exp())


def _figures(
    suffix: str, classifier: FeatureClassifier, images: Tensor, label: Tensor, train: Tensor
) -> dict[str, Any]:
    features, log_p = classifier.features(images)
    return {
        f"frechet_distance{suffix}": frechet_distance(features, train),
        f"class_score{suffix}": class_score(log_p),
        f"class_agreement{suffix}": float((log_p.argmax(1) == label).double().mean()),
    }


def _test_figures(classifier: FeatureClassifier, test: ExampleSet[Any], train: Tensor) -> dict[str, Any]:
    """The same figures of real images outside the training part: what a perfect generator would get."""
    names = ("frechet_distance_test", "class_score_test", "class_agreement_test")
    if len(test) < 2:
        return dict.fromkeys(names)
    batch = _spaced(test)
    return _figures("_test", classifier, batch.images, batch.labels, train)


def _spaced(examples: ExampleSet[Any]) -> Any:
    """A batch of up to 10,000 examples, evenly spaced, as files may be sorted by class."""
    count = min(len(examples), _MAX_REAL_IMAGES)
    return examples.select(np.linspace(0, len(examples) - 1, count).astype(np.int64))


def write_grid(sampler: Any, classes: int, generator: torch.Generator, path: Path) -> None:
    """Ten samples of each of the first ten classes, as a PNG."""
    import matplotlib.image  # slow to import, and most commands draw nothing

    rows = min(classes, _ROWS)
    images: Tensor = sampler(torch.arange(rows).repeat_interleave(_COLUMNS), generator)
    channels, height, width = images.shape[1:]
    factor = max(1, -(-_LEAST_SIDE // max(height, width)))
    enlarged = images.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    framed = torch.nn.functional.pad(enlarged, (1, 1, 1, 1), value=255)
    tiles = framed.view(rows, _COLUMNS, channels, height * factor + 2, width * factor + 2)
    picture = tiles.permute(0, 3, 1, 4, 2).reshape(rows * tiles.shape[3], _COLUMNS * tiles.shape[4], channels)
    pixels = (picture if channels == 3 else picture[..., :1].expand(-1, -1, 3)).contiguous().numpy()
    matplotlib.image.imsave(path, pixels)
