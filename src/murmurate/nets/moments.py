"""Mean and variance of all samples seen so far, and the normalisation of observations by them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from murmurate.spec import EnvSpec

_LIMIT = 10.0  # of normalized observations


class RunningMoments(nn.Module):
    """Mean and variance [*shape] of all samples included so far; 0 and 1 before the first.

    They are float64 buffers, so the checkpoint of a net that contains this module contains them.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("variance", torch.ones(tuple(shape), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def include(self, mean: Tensor, square: Tensor, count: int) -> None:
        """Include ``count`` samples of which these are the mean and the mean square [*shape].

        Source: Chan, Golub and LeVeque 1979, eq. 2.1, divided by the counts.
        """
        total = self.count + count
        delta, batch_variance = mean - self.mean, (square - mean.square()).clamp(min=0.0)
        share = count / total
        self.variance.copy_(
            (1.0 - share) * self.variance + share * batch_variance + share * (1.0 - share) * delta.square()
        )
        self.mean.add_(share * delta)
        self.count.copy_(total)


class ObservationNormalizer(nn.Module):
    """Observations [B, ...] minus the mean, divided by the standard deviation, clipped to +-10, in float32.

    The moments change only by ``moments.include``: a learner includes a rollout after it has learned from
    it, so acting and learning normalise in the same way, and an evaluation does not change the moments.

    Raises:
        ValueError: for images, whose torsos read uint8.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        if dtype == torch.uint8:
            raise ValueError("images are not normalised: leave out normalize_observations")
        self.moments = RunningMoments(shape)

    def forward(self, observation: Tensor) -> Tensor:
        scale = torch.rsqrt(self.moments.variance + 1e-8)
        centred = (observation - self.moments.mean) * scale
        return centred.clamp(-_LIMIT, _LIMIT).float()


def observation_normalizer(spec: EnvSpec, wanted: bool) -> ObservationNormalizer | None:
    """None unless it is ``wanted``. Raises ValueError for observations that are images, or hold some."""
    if wanted and spec.holds_images:
        also = "; numbers beside them can be scaled in the environment" if spec.parts else ""
        raise ValueError(f"images are not normalised: leave out normalize_observations{also}")
    return ObservationNormalizer(spec.observation_shape, spec.observation_dtype) if wanted else None
