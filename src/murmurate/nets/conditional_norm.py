"""Batch normalisation whose gain and shift depend on the class of the example."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Gather = Callable[[Tensor], Tensor]  # stacks the tensors [...] of all k replicas to [k, ...]; differentiable

_EPSILON = 1e-5


class ConditionalBatchNorm(nn.Module):
    """Normalises each channel by its mean and variance over the batch; gain and shift depend on the class.

    Source: Dumoulin et al. 2017 (conditional instance normalisation), Miyato and Koyama 2018. Statistics over
    the batches of several replicas: TF-Replicator, section 3.3. Differs: the variance in that paper is the
    mean of squares minus the square of the mean (once two slips in its listing are corrected), which loses
    digits where the mean is large. Here it is the mean of the replicas' variances plus the variance of their
    means.

    gather: if set, statistics are over all replicas, whose batches must have equal sizes; None: over this
    replica's batch. Each batch is normalised by its own statistics until ``fix`` stores fixed ones, which
    make samples independent of one another.
    """

    mean: Tensor | None
    variance: Tensor | None

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(classes, channels))
        self.shift = nn.Parameter(torch.zeros(classes, channels))
        self.gather: Gather | None = None
        self.register_buffer("mean", None)
        self.register_buffer("variance", None)

    def fix(self, mean: Tensor, variance: Tensor) -> None:
        """Normalise by this mean and variance [C] from now on."""
        self.mean, self.variance = mean, variance

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and (biased) variance [C] of each channel of ``x`` [B, C, H, W], over the replicas if there is
        a ``gather``."""
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        if self.gather is None:
            return mean, variance
        means, variances = self.gather(torch.stack([mean, variance])).unbind(1)
        mean = means.mean(0)
        return mean, variances.mean(0) + (means - mean).square().mean(0)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        """x [B, C, H, W], label [B] int64 to [B, C, H, W]."""
        with torch.autocast(x.device.type, enabled=False):
            gain, shift = F.embedding(label, self.gain), F.embedding(label, self.shift)
            if self.gather is None and self.mean is None:
                # no cast is needed: torch's kernel reads bfloat16 and sums in float32
                normal = F.batch_norm(x, None, None, training=True, eps=_EPSILON)
                return torch.addcmul(_planes(shift, x), normal, _planes(gain, x))
            mean, variance = self.mean, self.variance
            if mean is None or variance is None:
                mean, variance = self.statistics(x.to(gain.dtype))
            scale = gain * torch.rsqrt(variance + _EPSILON)
            return torch.addcmul(_planes(shift - mean * scale, x), x, _planes(scale, x))


def _planes(rows: Tensor, x: Tensor) -> Tensor:
    """[B, C] as [B, C, 1, 1] of the dtype of ``x``."""
    return rows[:, :, None, None].to(x.dtype)
