"""A Bayesian Gaussian mixture by stochastic variational inference, under any strategy.

It is an example of the models of Mohamad et al., section 7, and Hoffman et al. 2013, section 2. The learner
is in ``workloads.conjugate``, the formulas are in ``losses.mixture``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from murmurate.datasets.table import Table
from murmurate.errors import Refusal
from murmurate.losses.mixture import (
    Posterior,
    Prior,
    divergence,
    log_joint,
    posterior,
    statistics,
    width_of,
)
from murmurate.ranges import NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval, check_ranges
from murmurate.replica.sparse import Rows
from murmurate.replicator.learner import Context
from murmurate.spec import EnvSpec, Examples, derive_seed
from murmurate.workloads.conjugate import ConjugateConfig, ConjugateLearner, StepDelay, StepRule, StepSize
from murmurate.workloads.mixture import Mixture, centred

_INIT_ROWS = 20_000  # the most rows from which the prior and the initial parameters are computed
_LLOYD_STEPS = 10


@dataclass(frozen=True)
class MixtureModel(ConjugateConfig):
    """Hyper-parameters of the model and of its inference.

    components: number of components, K; superfluous components get weights near 0. batch: number of rows in
        an update, G.
    covariance: form of a component's covariance matrix: ``full`` or ``diagonal``.
    concentration: alpha_0 of the Dirichlet prior of the weights; none is 1 / K.
    precision: beta_0; the prior's mean of a component, which is the mean of the data, weighs as much as
        this many rows. (Mean and covariance of the data are computed from at most 20,000 rows.)
    freedom: nu_0 of the Wishart prior of a component's precision matrix; none is the number of columns. The
        prior's scatter W_0^-1 is the covariance of the data.
    step_rule: rule for the local step size eta at update t, and for the weight rho of a pushed step.
        ``robbins-monro``: eta = (delay + t) ** -forgetting; ``average``: eta is the constant ``rate``; with
        either of these, rho averages the steps of several replicas. ``paper``: eta = rho =
        rate / (p B M) ** 0.25 (Mohamad et al., equation 13; p, B and M: see ``DPSGD``), so a step has the
        size eta rho; under strategies other than ``DPSGD``, ``paper`` is ``average``.
    rate: parameter of ``average`` and ``paper``. delay, forgetting: parameters of ``robbins-monro``.
    init: ``k-means`` begins with the k-means clusters of a sample of rows, ``random`` assigns each row of the
        sample to the nearest of K random rows.
    validate_every: updates of a replica between evaluations of the likelihood of some validation rows; in a
        run of fewer than 20 times as many, a twentieth of its updates. 0: never.
    """

    name: ClassVar[str] = "gmm"
    summary: ClassVar[str] = "Bayesian Gaussian mixture by stochastic variational inference"

    components: PositiveInt = 10
    batch: PositiveInt = 256
    covariance: Literal["full", "diagonal"] = "full"
    concentration: PositiveFloat | None = None
    precision: PositiveFloat = 1.0
    freedom: PositiveFloat | None = None
    step_rule: StepRule = "robbins-monro"
    rate: StepSize = 0.1
    delay: StepDelay = 10.0
    forgetting: UnitInterval = 0.7
    init: Literal["k-means", "random"] = "k-means"
    validate_every: NonNegativeInt = 100

    @property
    def requires(self) -> Examples:
        return Examples(self.batch, "rows", shrinks=self.eta(0))  # as of a topic model: x has counts

    def check(self, columns: int) -> None:
        """Raise ValueError for hyper-parameters out of range."""
        check_ranges(self)
        least = columns - 1 if self.covariance == "full" else 0
        if self.freedom is not None and not self.freedom > least:
            raise ValueError(f"freedom is {self.freedom}; with {columns} columns it must be above {least}")

    def vector_bytes(self, spec: EnvSpec) -> int:
        return 8 * self.components * width_of(spec.observation_shape[0], self.covariance == "full")

    def build(self, context: Context) -> ConjugateLearner[Mixture]:
        """The learner. The prior and the initial parameters are computed from ``context.examples``; without
        these, both must be loaded from a checkpoint.

        Raises ValueError for hyper-parameters out of range, Refusal for a constant column.
        """
        columns, table = context.spec.observation_shape[0], context.examples
        self.check(columns)
        model = GaussianMixture(self, columns)
        if table is not None:
            random = np.random.default_rng(derive_seed(context.seed, "mixture"))
            sample = random.choice(len(table), size=min(len(table), _INIT_ROWS), replace=False)
            model.initialise(table.select(sample), context.spec.examples, random)
        return ConjugateLearner(
            model.to(context.device),
            context.replicate,
            examples=context.spec.examples,
            eta=self.eta,
            validation=context.validation if context.rank == 0 else None,
            validated_after=self.validated_after(context),
        )


class GaussianMixture(nn.Module):
    """The table x [K, W] float64, which is lambda minus the prior (``losses.mixture`` describes its rows).

    The prior is computed from the data, so it is stored with the parameters: its mean ``centre`` [D], which
    is subtracted from all data, and its ``scatter`` [D, D] or [D].
    """

    label = "mixture"
    centre: Tensor
    scatter: Tensor

    def __init__(self, config: MixtureModel, columns: int) -> None:
        super().__init__()
        self.config = config
        self.full = config.covariance == "full"
        width, dtype = width_of(columns, self.full), torch.float64
        self.table = nn.Parameter(torch.zeros(config.components, width, dtype=dtype))
        self.register_buffer("centre", torch.zeros(columns, dtype=dtype))
        scatter = torch.eye(columns, dtype=dtype) if self.full else torch.ones(columns, dtype=dtype)
        self.register_buffer("scatter", scatter)

    @property
    def width(self) -> int:
        return self.table.shape[1]

    @property
    def prior(self) -> Prior:
        """The prior zeta."""
        config = self.config
        concentration = 1 / config.components if config.concentration is None else config.concentration
        freedom = len(self.centre) if config.freedom is None else config.freedom
        return Prior(concentration, config.precision, freedom, self.scatter.cpu())

    def expected(self, x: Tensor, scale: float, examples: Table, /) -> Posterior:
        return posterior((scale * x).cpu(), self.prior)

    def statistics(
        self, expected: Posterior, examples: Table, weight: float, /
    ) -> tuple[Rows, dict[str, Tensor | float]]:
        y = centred(examples, self.centre.cpu())
        joint = log_joint(y, expected)
        values = weight * statistics(y, torch.softmax(joint, 1), self.full)
        bound = torch.logsumexp(joint, 1)
        return Rows(torch.arange(len(values)), values), {"bound_per_row": bound.mean()}

    def bound(self, x: Tensor, examples: Table, /) -> tuple[Tensor, float]:
        mixture = self.estimate(x)
        return mixture.elbo_per_row(examples), -float(divergence(mixture.posterior, self.prior))

    def refresh(self, x: Tensor, /) -> None:
        """Nothing to do: no row is derived from others."""

    def estimate(self, x: Tensor, /) -> Mixture:
        return Mixture(posterior(x.cpu().clone(), self.prior), self.centre.cpu().clone())

    def validation_metrics(self, x: Tensor, examples: Table, /) -> dict[str, float]:
        return {"log_likelihood": float(self.estimate(x).log_likelihood(examples).mean())}

    # -- initialisation -----------------------------------------------------------------------------

    def initialise(self, rows: Table, total: int, random: np.random.Generator) -> None:
        """Set the prior and the initial parameters from ``rows``, a sample of ``total`` rows; the parameters
        are scaled up to all of them. Raises Refusal for a constant column."""
        y = torch.from_numpy(rows.values.astype(np.float64))
        variance, mean = torch.var_mean(y, 0, correction=0)
        constant = (variance <= 1e-24 * mean.square()).nonzero().flatten().tolist()
        if constant:
            raise Refusal(
                f"Column {constant[0]} (from 0) is the same in {len(y):,} rows to learn from, or varies too "
                "little beside its mean. Leave it out, or subtract its mean."
            )
        self.centre.copy_(mean)
        y = y - mean
        covariance = y.T @ y / len(y)
        # collinear columns: the prior must exceed the rounding errors of sums over all rows
        floor = max(1e-9, 4e-15 * total)
        self.scatter.copy_(covariance + floor * torch.diag(variance) if self.full else variance)
        cluster = _clusters(y / variance.sqrt(), self.config.components, self.config.init, random)
        responsibilities = nn.functional.one_hot(cluster, self.config.components).double()
        with torch.no_grad():
            self.table.copy_(total / len(y) * statistics(y, responsibilities, self.full))


def _clusters(y: Tensor, count: int, init: str, random: np.random.Generator) -> Tensor:
    """[n] the cluster of each row of y [n, D]: by k-means++ (Arthur and Vassilvitskii 2007) and a few of
    Lloyd's iterations or, with init "random", by the nearest of random rows."""
    if init == "random":
        centres = y[random.choice(len(y), size=count, replace=len(y) < count)]
        return torch.cdist(y, centres).argmin(1)
    chosen = [int(random.integers(len(y)))]
    nearest = (y - y[chosen[0]]).square().sum(1)
    while len(chosen) < count:
        probability = nearest.numpy() / float(nearest.sum()) if float(nearest.sum()) > 0 else None
        chosen.append(int(random.choice(len(y), p=probability)))
        nearest = torch.minimum(nearest, (y - y[chosen[-1]]).square().sum(1))
    centres = y[chosen].clone()
    for _ in range(_LLOYD_STEPS):
        cluster = torch.cdist(y, centres).argmin(1)
        size = torch.bincount(cluster, minlength=count)
        sums = torch.zeros_like(centres).index_add_(0, cluster, y)
        centres = torch.where(size[:, None] > 0, sums / size.clamp(min=1)[:, None], centres)
    return torch.cdist(y, centres).argmin(1)
