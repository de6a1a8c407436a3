"""The loss and the accuracy of classifiers."""

from __future__ import annotations

from collections.abc import Sequence

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
    weight_k: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy in nats, a scalar.

    With ``other_label_b``: share x H(label_b) + (1 - share) x H(other_label_b), H the cross-entropy, for
    images mixed in these shares (mixup, Zhang et al. 2018, equation 1). smoothing: the share of each label
    that is spread evenly over all classes (Szegedy et al. 2016, section 7). weight_k: H(label) is multiplied
    by the weight of the label's class.

    Differs: ``F.cross_entropy`` divides by the sum of the batch's weights, so that the mean over replicas
    would not be the loss of their joined batch; here it is divided by B.

    Shapes: logits_b [B, K]; labels [B] int64; weight_k [K].
    """
    loss = _cross_entropy(logits_b, label_b, smoothing, weight_k)
    if other_label_b is None:
        return loss
    return share * loss + (1 - share) * _cross_entropy(logits_b, other_label_b, smoothing, weight_k)


def _cross_entropy(logits_b: Tensor, label_b: Tensor, smoothing: float, weight_k: Tensor | None) -> Tensor:
    _check(logits_b, label_b)
    if weight_k is None:
        return F.cross_entropy(logits_b, label_b, label_smoothing=smoothing)
    check_shape(logits_b.shape[1:], "the columns of logits_b", weight_k=weight_k)
    each = F.cross_entropy(logits_b, label_b, label_smoothing=smoothing, reduction="none")
    return (weight_k[label_b] * each).mean()


def balanced_weights(counts: Sequence[int]) -> Tensor:
    """Weights [K] of classes with so many examples, in inverse proportion to these: n / (m counts_k), where n
    is the sum of counts and m the number of classes that are not empty. Their mean over the examples is 1.

    An empty class has weight 0. Raises ValueError for counts without any example.
    """
    if not any(counts):  # not asked of the tensor, which has no values on the device meta
        raise ValueError(f"counts are {list(counts)}: there is no example")
    count_k = torch.tensor(counts, dtype=torch.float64)
    return torch.where(count_k > 0, count_k.sum() / ((count_k > 0).sum() * count_k), 0.0).float()


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
