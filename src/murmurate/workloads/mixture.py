"""A Gaussian mixture that was found, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from murmurate.datasets.table import Table
from murmurate.losses.mixture import Posterior, log_joint, log_predictive

_ROWS = 1_024  # looked at at a time


@dataclass(frozen=True)
class Mixture:
    """The posterior of a Bayesian Gaussian mixture of K components, its means less ``centre`` [D]."""

    posterior: Posterior
    centre: Tensor

    @property
    def weights(self) -> Tensor:
        """[K] float64, their mean: sums to 1."""
        alpha = self.posterior.alpha
        return alpha / alpha.sum()

    @property
    def means(self) -> Tensor:
        """[K, D] float64, their mean."""
        return self.posterior.mean + self.centre

    @property
    def covariances(self) -> Tensor:
        """[K, D, D] float64, or [K, D] of diagonals: the inverse of the mean precision."""
        q = self.posterior
        return q.scatter / q.nu.view(-1, *[1] * (q.scatter.dim() - 1))

    def responsibilities(self, table: Table) -> Tensor:
        """[G, K] how likely each component is to have made each row; rows sum to 1."""
        return torch.softmax(self._asked(table, log_joint), 1)

    def log_likelihood(self, table: Table) -> Tensor:
        """[G] log density of each row given all that was learned (nats, in the data's units)."""
        return self._asked(table, log_predictive)

    def bounds(self, table: Table) -> Tensor:
        """[G] each row's terms of the evidence lower bound (scikit-learn's ``score_samples``)."""
        return torch.logsumexp(self._asked(table, log_joint), 1)

    def _asked(self, table: Table, ask: Callable[[Tensor, Posterior], Tensor]) -> Tensor:
        """[G, ...] float64: some rows at a time."""
        pieces = placed(table, self.centre).chunk(max(1, -(-len(table) // _ROWS)))
        return torch.cat([ask(piece, self.posterior) for piece in pieces])


def placed(table: Table, centre: Tensor) -> Tensor:
    """[G, D] float64, less ``centre``. Raises ValueError for another number of columns."""
    if table.columns != len(centre):
        raise ValueError(f"the table has {table.columns} columns, and the mixture {len(centre)}")
    return torch.from_numpy(table.values.astype("float64")) - centre
