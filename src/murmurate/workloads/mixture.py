"""A fitted Gaussian mixture and its predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from murmurate.datasets.table import Table
from murmurate.losses.mixture import Posterior, log_joint, log_predictive

_ROWS = 1_024  # rows that are evaluated at a time


@dataclass(frozen=True)
class Mixture:
    """The posterior of a Bayesian Gaussian mixture of K components. ``posterior`` is for data from which
    ``centre`` [D] is subtracted; methods take the original data, as a table or an array [rows, D]."""

    posterior: Posterior
    centre: Tensor

    @property
    def weights(self) -> Tensor:
        """[K] float64, the posterior mean of the weights; sums to 1."""
        alpha = self.posterior.alpha
        return alpha / alpha.sum()

    @property
    def means(self) -> Tensor:
        """[K, D] float64, the posterior mean of the components' means."""
        return self.posterior.mean + self.centre

    @property
    def covariances(self) -> Tensor:
        """[K, D, D] float64, or [K, D] diagonals: the inverses of the posterior mean precisions."""
        q = self.posterior
        return q.scatter / q.nu.view(-1, *[1] * (q.scatter.dim() - 1))

    def responsibilities(self, table: Table | ArrayLike) -> Tensor:
        """[rows, K] the probability of each component for each row; rows sum to 1."""
        return torch.softmax(self._in_batches(table, log_joint), 1)

    def probabilities(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """``responsibilities`` of an array [rows, D], as an array."""
        shares: NDArray[np.float64] = self.responsibilities(rows).numpy()
        return shares

    def log_likelihood(self, table: Table | ArrayLike) -> Tensor:
        """[rows] log posterior predictive density of each row, in nats."""
        return self._in_batches(table, log_predictive)

    def elbo_per_row(self, table: Table | ArrayLike) -> Tensor:
        """[rows] each row's contribution to the evidence lower bound (scikit-learn's ``score_samples``)."""
        return torch.logsumexp(self._in_batches(table, log_joint), 1)

    def _in_batches(self, rows: Table | ArrayLike, function: Callable[[Tensor, Posterior], Tensor]) -> Tensor:
        """[rows, ...] float64, ``function`` of all rows, computed for ``_ROWS`` rows at a time."""
        table = rows if isinstance(rows, Table) else Table(np.asarray(rows))
        batches = centred(table, self.centre).chunk(max(1, -(-len(table) // _ROWS)))
        return torch.cat([function(batch, self.posterior) for batch in batches])


def centred(table: Table, centre: Tensor) -> Tensor:
    """[rows, D] float64, the rows minus ``centre``. Raises ValueError for another number of columns."""
    if table.columns != len(centre):
        raise ValueError(f"the table has {table.columns} columns, and the mixture {len(centre)}")
    return torch.from_numpy(table.values.astype("float64")) - centre
