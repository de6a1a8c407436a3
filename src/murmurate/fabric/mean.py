"""A mean that is bitwise the same whichever member computes it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def ordered_mean(vectors: Mapping[int, Tensor]) -> Tensor:
    """The mean of equally shaped vectors by rank, summed in the order of ranks."""
    first, *rest = (vectors[rank] for rank in sorted(vectors))
    total = first.clone()
    for x in rest:
        total += x.to(total.device)
    return total.div_(len(vectors)) if rest else total
