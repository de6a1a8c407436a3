"""The loss of classifiers with a weight for each class, and weights for classes of unequal size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from murmurate.losses.classification import balanced_weights, classification_loss

LOGITS = torch.tensor(
    [[2.0, 1.0, 0.0], [0.0, 0.5, 3.0], [1.0, 1.0, 1.0], [0.3, -1.0, 2.0]], dtype=torch.float64
)
LABELS, OTHER = torch.tensor([0, 2, 1, 0]), torch.tensor([2, 2, 0, 1])
WEIGHTS = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_each_image_counts_by_the_weight_of_its_label(smoothing: float) -> None:
    def one(row: int, label: int) -> torch.Tensor:
        own = torch.tensor([label])
        return WEIGHTS[label] * F.cross_entropy(LOGITS[row : row + 1], own, label_smoothing=smoothing)

    expected = sum(one(row, int(label)) for row, label in enumerate(LABELS)) / 4
    found = classification_loss(LOGITS, LABELS, smoothing=smoothing, weight_k=WEIGHTS)
    torch.testing.assert_close(found, expected)
    mixed = 0.3 * expected + 0.7 * sum(one(row, int(label)) for row, label in enumerate(OTHER)) / 4
    found = classification_loss(LOGITS, LABELS, OTHER, share=0.3, smoothing=smoothing, weight_k=WEIGHTS)
    torch.testing.assert_close(found, mixed)


def test_the_mean_over_two_replicas_is_the_loss_of_the_joined_batch() -> None:
    halves = [classification_loss(LOGITS[k::2], LABELS[k::2], weight_k=WEIGHTS) for k in (0, 1)]
    whole = classification_loss(LOGITS, LABELS, weight_k=WEIGHTS)
    torch.testing.assert_close(sum(halves) / 2, whole)


def test_balanced_classes_weigh_the_same_in_all() -> None:
    assert balanced_weights((2, 6, 0)).tolist() == pytest.approx([2.0, 2 / 3, 0.0])
    assert balanced_weights((5, 5)).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="there is no example"):
        balanced_weights((0, 0))


def test_weights_of_other_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="columns of logits_b"):
        classification_loss(LOGITS, LABELS, weight_k=WEIGHTS[:2])
