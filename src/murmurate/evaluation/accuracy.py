"""Accuracy of classifiers on the test images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from murmurate.datasets.interface import DataSet
from murmurate.errors import Refusal
from murmurate.evaluation.interface import Curve, EvalContext, Evaluation
from murmurate.workloads.image_classifier import ClassifierLearner

_BY_CLASS = ("balanced_accuracy", "class_recall", "confusion")
_FIGURES = ("accuracy", "accuracy_stderr", "top5_accuracy", "test_loss", *_BY_CLASS)
_TOP = 5  # of fewer classes, or as many, each image's is among the so many most probable ones
_MOST_CONFUSED = 100  # classes of a confusion matrix
_UNEQUAL = 0.01  # difference between accuracy and balanced accuracy that the sentence mentions


@dataclass(frozen=True)
class Accuracy(Evaluation):
    """Shares of the test images whose class is the most probable one (top 1), or among the five most probable
    ones (top 5)."""

    curves: ClassVar[tuple[Curve, ...]] = (
        Curve("accuracy", "Accuracy", "accuracy on validation images", "Top 1.", digits=4),
        Curve("loss", "Loss", "cross-entropy of training batches (nats)", lower_is_better=True, digits=3),
    )

    headline: ClassVar[Curve] = Curve(
        "accuracy", "Accuracy", "accuracy on test images", "Top 1.", spread="accuracy_stderr"
    )

    validation: ClassVar[Mapping[str, str]] = {
        "accuracy": "validation_accuracy",
        "validation_loss": "validation_loss",
    }

    def evaluate(self, learner: ClassifierLearner, context: EvalContext) -> dict[str, Any]:
        """Figures: accuracy, accuracy_stderr (binomial), top5_accuracy, test_loss (nats), those of
        ``_by_class``, classes, test_images (classified), test_images_found (in the data set),
        test_images_skipped (left out because they could not be read); validation_accuracy, validation_loss
        (nats), validation_images (classified). ``context.count``: classify so many test and so many
        validation images, drawn at random."""
        if context.count is not None and context.count < 1:
            raise Refusal(f"{context.count} images are to be classified; take at least one.")
        _, validation, test = cast(DataSet, context.world).divided()
        found = len(test)
        chosen = found if context.count is None else min(context.count, found)
        batches: list[Tensor] = []  # labels and most probable classes [2, B]

        def seen(labels: Tensor, logits: Tensor) -> None:
            batches.append(torch.stack([labels, logits.topk(1, 1).indices[:, 0]]).cpu())

        figures = learner.figures(test, context.count, context.seed, seen=seen)
        validated = learner.figures(validation, context.count, context.seed)
        count = int(figures["images"])
        numbers = {
            "classes": learner.classes,
            "test_images": count,
            "test_images_found": found,
            "test_images_skipped": chosen - count,
            "validation_images": int(validated["images"]),
            "validation_accuracy": validated["accuracy"] if validated["images"] else None,
            "validation_loss": validated["loss"] if validated["images"] else None,
        }
        if not count:
            return dict.fromkeys(_FIGURES) | numbers
        accuracy = figures["accuracy"]
        labels, predicted = torch.cat(batches, 1).numpy()
        return numbers | {
            "accuracy": accuracy,
            "accuracy_stderr": math.sqrt(accuracy * (1 - accuracy) / count),
            "top5_accuracy": figures["top5_accuracy"],
            "test_loss": figures["loss"],
            **_by_class(labels, predicted, learner.classes),
        }

    def sentence(self, figures: Mapping[str, Any]) -> str:
        count, skipped = figures.get("test_images"), figures.get("test_images_skipped", 0)
        if figures.get("accuracy") is None or count is None:
            return f"None of {skipped:,} test images could be read" if skipped else ""
        found = figures.get("test_images_found", count)  # runs of earlier versions have no such figure
        of_all = "" if found == count else f" of {found:,}"
        broken = f" ({skipped:,} could not be read)" if skipped else ""
        more = []
        if figures.get("classes", _TOP + 1) > _TOP:
            more.append(f"top 5: {figures['top5_accuracy']:.2%}")
        balanced = figures.get("balanced_accuracy")
        if balanced is not None and abs(balanced - figures["accuracy"]) >= _UNEQUAL:
            more.append(f"mean over the classes: {balanced:.2%}")
        brackets = f" ({'; '.join(more)})" if more else ""
        return f"Accuracy on {count:,}{of_all} test images{broken}: {figures['accuracy']:.2%}{brackets}"


def _by_class(labels: NDArray[np.int64], predicted: NDArray[np.int64], classes: int) -> dict[str, Any]:
    """class_recall: of the images of each class [K], the share that is classified correctly; None for a
    class without test images. balanced_accuracy: the mean of these shares. confusion: [K, K], the number of
    images by class (row) and most probable class (column); None for more than 100 classes."""
    images = np.bincount(labels, minlength=classes)
    right = np.bincount(labels[labels == predicted], minlength=classes)
    confusion = None
    if classes <= _MOST_CONFUSED:
        pairs = np.bincount(labels * classes + predicted, minlength=classes**2)
        confusion = pairs.reshape(classes, classes).tolist()
    return {
        "balanced_accuracy": float((right[images > 0] / images[images > 0]).mean()),
        "class_recall": [r / n if n else None for r, n in zip(right.tolist(), images.tolist(), strict=True)],
        "confusion": confusion,
    }
