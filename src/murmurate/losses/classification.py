"""The loss and the accuracy of classifiers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from murmurate.losses.checks import check_kind, check_rank, check_shape


def classification_loss(
    logits_b: Tensor,
    label_b: Tensor,
    other_label_b: Tensor | None = None,
    *,
    share: float = 1.0,
    smoothing: float = 0.0,
) -> Tensor:
    """Mean cross-entropy in nats, a scalar.

    With ``other_label_b``: share x H(label_b) + (1 - share) x H(other_label_b), H the cross-entropy, for
    images mixed in these shares (mixup, Zhang et al. 2018, equation 1). smoothing: the share of each label
    that is spread evenly over all classes (Szegedy et al. 2016, section 7).

    Shapes: logits_b [B, K]; labels [B] int64.
    """
    _check(logits_b, label_b)
    loss = F.cross_entropy(logits_b, label_b, label_smoothing=smoothing)
    if other_label_b is None:
        return loss
    _check(logits_b, other_label_b)
    return share * loss + (1 - share) * F.cross_entropy(logits_b, other_label_b, label_smoothing=smoothing)


def hits(logits_b: Tensor, label_b: Tensor, *, top: int) -> Tensor:
    """[B] bool: whether the label is among the ``top`` classes with the largest logits.

    Shapes: logits_b [B, K]; label_b [B] int64. With K <= top, all are True.
    """
    _check(logits_b, label_b)
    best = logits_b.topk(min(top, logits_b.shape[1]), 1).indices
    return (best == label_b[:, None]).any(1)


def _check(logits_b: Tensor, label_b: Tensor) -> None:
    check_rank(2, logits_b=logits_b)
    check_rank(1, label_b=label_b)
    check_shape(logits_b.shape[:1], "the rows of logits_b", label_b=label_b)
    check_kind(torch.int64, label_b=label_b)
