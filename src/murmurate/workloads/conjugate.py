"""Conjugate-exponential models by stochastic variational inference, and their common learner.

Mohamad et al., section 7, equations 38 to 52; Hoffman et al. 2013, section 2. The posterior has the natural
parameters lambda = zeta + x, where zeta are the natural parameters of the prior, and x approximates the
expected sufficient statistics E[t] of all n examples. A natural-gradient step on the evidence lower bound of
a mini-batch of G examples is

    lambda <- lambda + eta (zeta + n / G sum E[t] - lambda),   that is,   x <- x + eta (n / G sum E[t] - x)

(equations 50 and 52), which is plain SGD along ``x - n / G sum E[t]``. So replicas exchange x as they would
exchange the parameters of a net. x is a table; a mini-batch may touch only a few of its rows (``Rows``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from murmurate.datasets.interface import ExampleSet
from murmurate.ranges import OpenUnitInterval, Range
from murmurate.replica.sparse import Rows
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import Batch, Outcome
from murmurate.workloads.validation_times import ValidationTimes

Estimate = TypeVar("Estimate", covariant=True)

StepRule = Literal["robbins-monro", "average", "paper"]
StepSize = OpenUnitInterval
StepDelay = Annotated[float, Range(1, 1e30)]  # below 1 the first step would go beyond lambda-hat
_REFRESH_UPDATES = 1_000  # updates between two calls of ``ConjugateModel.refresh``
_MOST_VALIDATED = 500  # validation examples that are evaluated, at most


class ConjugateModel(Protocol[Estimate]):
    """A module whose only parameter is the table x [R, W] (see the top of this file)."""

    label: str  # name of its replica, which is a key of checkpoints

    @property
    def width(self) -> int:
        """W, the number of columns of x."""
        ...

    def expected(self, x: Tensor, scale: float, examples: Any, /) -> Any:
        """The expectations under lambda = zeta + scale x that the E-step on ``examples`` needs, such as
        E[log beta] (equation 44). The result shares no memory with ``x``, to which other replicas may
        write."""
        ...

    def statistics(
        self, expected: Any, examples: Any, weight: float, /
    ) -> tuple[Rows, dict[str, Tensor | float]]:
        """The E-step: (``weight`` times the sum of E[t] over the examples, in the rows that they touch;
        metrics by name)."""
        ...

    def bound(self, x: Tensor, examples: Any, /) -> tuple[Tensor, float]:
        """The terms of the evidence lower bound at lambda = zeta + x: (the terms of each example [G] float64,
        at its optimal local parameters; the term of the global parameters, E[log p(beta) - log q(beta)])."""
        ...

    def refresh(self, x: Tensor, /) -> None:
        """Recompute in place the rows that are sums of other rows, because rounding errors add up."""
        ...

    def estimate(self, x: Tensor, /) -> Estimate:
        """The model with the posterior lambda = zeta + x."""
        ...

    def validation_metrics(self, x: Tensor, examples: Any, /) -> dict[str, float]:
        """Metrics, by name, of how well the posterior lambda = zeta + x predicts validation examples."""
        ...


class ConjugateLearner(Generic[Estimate]):
    """One replica of a model (see ``Learner``).

    Args:
        model: the model on its device, with its initial parameters, which are the same for all replicas.
        replicate: makes the model's replica (``Context.replicate``).
        examples: n. eta: step size as a function of the number of updates, before a strategy scales it.
        validation: held-out examples, of which some are evaluated after these updates of this replica
            (``validated_after``); None: never.
    """

    def __init__(
        self,
        model: ConjugateModel[Estimate],
        replicate: Callable[..., Replica],
        *,
        examples: int,
        eta: Callable[[int], float],
        validation: ExampleSet[Any] | None = None,
        validated_after: ValidationTimes | None = None,
    ) -> None:
        self.model, self.examples, self.eta = model, examples, eta
        self._validation = None
        if validation is not None and validated_after is not None:
            self._validation = validation.select(range(min(len(validation), _MOST_VALIDATED)))
        self._validated_after = validated_after
        self._validation_metrics: dict[str, float] = {}
        self.replica: Replica = replicate(
            model.label, model, lambda parameters: torch.optim.SGD(parameters, lr=1.0), schedule=eta
        )

    @property
    def clock(self) -> int:
        return self.replica.clock

    @property
    def replicas(self) -> dict[str, Replica]:
        return {self.replica.name: self.replica}

    def learn(self, batch: Batch) -> Outcome:
        if self.clock % _REFRESH_UPDATES == _REFRESH_UPDATES - 1:
            # ``rewriting`` keeps other replicas from multiplying x by its scale meanwhile, which would leave
            # rows with different scales
            with torch.no_grad(), self.replica.scale.rewriting():
                self.model.refresh(self._table())
        clock, model_metrics = self.clock, self.step(batch.data)
        metrics: dict[str, Tensor | float] = {
            "eta": self.eta(self.replica.steps_taken() - 1),
            **model_metrics,
        }
        if self._validation is not None and self._validated_after is not None:
            if self._validated_after.passed(clock, self.clock):
                self._validation_metrics = self.model.validation_metrics(self.values(), self._validation)
            metrics.update(self._validation_metrics)
        return Outcome(metrics)

    def step(self, examples: Any) -> dict[str, Tensor | float]:
        """Make one step along x - n / G sum E[t]. Returns the model's metrics."""
        x = self._table()
        expected = self.replica.scale.read_consistently(lambda scale: self.model.expected(x, scale, examples))
        rows, metrics = self.model.statistics(expected, examples, self.examples / max(len(examples), 1))
        self.replica.follow(Rows(rows.row.to(x.device), rows.values.to(x.device), rows.shrink))
        return metrics

    def elbo(self, examples: Any) -> float:
        """The evidence lower bound of all n examples, estimated from a sample of them (equation 51)."""
        local_terms, global_term = self.model.bound(self.values(), examples)
        return float(local_terms.sum()) * self.examples / len(examples) + global_term

    def estimate(self) -> Estimate:
        """The model with the present posterior."""
        return self.model.estimate(self.values())

    def values(self) -> Tensor:
        """[R, W] x, multiplied by its scale."""
        return self.replica.values().detach().view(-1, self.model.width)

    def _table(self) -> Tensor:
        return self.replica.params.detach().view(-1, self.model.width)

    # -- state --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The last measurements on validation examples."""
        return {"validated": dict(self._validation_metrics)}

    def load(self, state: dict[str, Any]) -> None:
        if self._validation is not None:  # else it is the state of a peer that measures
            self._validation_metrics = dict(state.get("validated", {}))


class ConjugateConfig(LearnerConfig):
    """Step sizes and validations of these models, whose configs have the fields below."""

    batch: int
    step_rule: StepRule
    rate: float
    delay: float
    forgetting: float
    validate_every: int

    def validated_after(self, context: Context) -> ValidationTimes | None:
        """After which updates the learner of ``context`` is validated; None: never."""
        return ValidationTimes.of(context, self.validate_every, self.batch, most=_MOST_VALIDATED)

    def eta(self, t: int) -> float:
        """The local step size after ``t`` updates, before a strategy scales it."""
        is_decreasing = self.step_rule == "robbins-monro"
        return float((self.delay + t) ** -self.forgetting) if is_decreasing else self.rate

    def adapted(self, strategy: Any) -> Any:
        """Under the step rule ``paper``, a strategy with its own step size (DPSGD's rho) takes it from
        here."""
        return strategy.with_model_steps(self.rate) if self.step_rule == "paper" else strategy
