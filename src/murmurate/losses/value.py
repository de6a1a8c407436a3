"""The loss of a value function against fixed targets."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from murmurate.losses.checks import check_rank, check_shape


def value_loss(v_t: Tensor, target_t: Tensor) -> Tensor:
    """Mean squared error ``mean((V_t - G_t)^2)``, without a factor of one half.

    Source: Mnih et al. 2016, Algorithm S3. Differs: the mean over steps and simulators, where the
    paper sums. A2C's usual coefficient of 0.5 is the agent's.

    Args:
        v_t: V_t [T, B].
        target_t: G_t [T, B]; a constant here, no gradient flows into it.
    """
    check_rank(2, v_t=v_t)
    check_shape(v_t.shape, "v_t", target_t=target_t)
    return F.mse_loss(v_t, target_t.detach())
