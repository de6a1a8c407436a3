"""The hinge losses of a generator and its discriminator."""

from __future__ import annotations

import torch
from torch import Tensor

from murmurate.losses.checks import check_rank


def discriminator_hinge(d_real: Tensor, d_fake: Tensor) -> Tensor:
    """The discriminator's loss ``mean(max(0, 1 - D(x))) + mean(max(0, 1 + D(G(z))))``.

    Source: Miyato et al. 2018, eq. 17 (negated, because eq. 17 is maximised); Zhang et al. 2018, eq. 3.
    An example at or beyond its margin of 1 gives no gradient.

    Args:
        d_real: D(x) [B], of images of the data set.
        d_fake: D(G(z)) [G], of generated images; G may differ from B.
    """
    check_rank(1, d_real=d_real, d_fake=d_fake)
    return torch.relu(1.0 - d_real).mean() + torch.relu(1.0 + d_fake).mean()


def generator_hinge(d_fake: Tensor) -> Tensor:
    """The generator's loss ``-mean(D(G(z)))``, which has no margin.

    Source: Miyato et al. 2018, eq. 18; Zhang et al. 2018, eq. 3.

    Args:
        d_fake: D(G(z)) [G].
    """
    check_rank(1, d_fake=d_fake)
    return -d_fake.mean()
