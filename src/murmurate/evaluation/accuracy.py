"""Accuracy of classifiers on the test images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from murmurate.datasets.interface import DataSet
from murmurate.errors import Refusal
from murmurate.evaluation.interface import Curve, EvalContext, Evaluation
from murmurate.workloads.image_classifier import ClassifierLearner

_FIGURES = ("test_images", "accuracy", "accuracy_stderr", "top5_accuracy", "test_loss")


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

    def evaluate(self, learner: ClassifierLearner, context: EvalContext) -> dict[str, Any]:
        """Figures: accuracy, accuracy_stderr (binomial), top5_accuracy, test_loss (nats), test_images.
        ``context.count``: classify only the first so many test images."""
        if context.count is not None and context.count < 1:
            raise Refusal(f"{context.count} images are to be classified; take at least one.")
        test = cast(DataSet, context.world).divided().test
        figures = learner.figures(test, context.count)
        count = int(figures["images"])
        if not count:
            return dict.fromkeys(_FIGURES) | {"test_images": 0}
        accuracy = figures["accuracy"]
        return {
            "test_images": count,
            "accuracy": accuracy,
            "accuracy_stderr": math.sqrt(accuracy * (1 - accuracy) / count),
            "top5_accuracy": figures["top5_accuracy"],
            "test_loss": figures["loss"],
        }

    def sentence(self, figures: Mapping[str, Any]) -> str:
        if figures.get("accuracy") is None:
            return ""
        return (
            f"Accuracy on {figures['test_images']:,} test images: {figures['accuracy']:.2%} "
            f"(top 5: {figures['top5_accuracy']:.2%})"
        )
