"""The mean that does not depend on who computes it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def ordered_mean(given: Mapping[int, Tensor]) -> Tensor:
    """The mean of equally shaped vectors; summed by ascending rank, so whoever asks gets the same bits."""
    first, *rest = (given[rank] for rank in sorted(given))
    total = first.clone()
    for x in rest:
        total += x.to(total.device)
    return total.div_(len(given)) if rest else total
