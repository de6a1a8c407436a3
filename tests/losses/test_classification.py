"""The loss and the hits of classifiers, against their definitions."""

from __future__ import annotations

import pytest
import torch

from murmurate.losses.classification import classification_loss, hits

LOGITS = torch.tensor(
    [[2.0, 1.0, 0.0, -1.0], [0.0, 0.5, 0.5, 3.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64
)
LABELS = torch.tensor([0, 2, 3])


def test_the_loss_is_the_cross_entropy_with_the_smoothed_labels() -> None:
    for smoothing in (0.0, 0.1, 1.0):
        target = torch.full((3, 4), smoothing / 4, dtype=torch.float64)
        target[range(3), LABELS] += 1 - smoothing
        expected = -(target * LOGITS.log_softmax(1)).sum(1).mean()
        torch.testing.assert_close(classification_loss(LOGITS, LABELS, smoothing=smoothing), expected)


def test_mixed_images_have_both_labels_in_their_shares() -> None:
    other = torch.tensor([1, 2, 0])
    target = torch.zeros(3, 4, dtype=torch.float64)
    target[range(3), LABELS] += 0.3
    target[range(3), other] += 0.7
    expected = -(target * LOGITS.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(classification_loss(LOGITS, LABELS, other, share=0.3), expected)


def test_hits() -> None:
    assert hits(LOGITS[:2], LABELS[:2], top=1).tolist() == [True, False]
    assert hits(LOGITS[:2], LABELS[:2], top=3).tolist() == [True, True]
    assert hits(LOGITS, LABELS, top=5).all()  # of four classes


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of logits_b"):
        classification_loss(LOGITS, LABELS[:2])
    with pytest.raises(ValueError, match="int64"):
        hits(LOGITS, LABELS.float(), top=1)
    with pytest.raises(ValueError, match="dimensions"):
        hits(LOGITS[0], LABELS, top=1)
