"""Models of the conjugate-exponential family, and the one learner of them all.

Mohamad et al., section 7, equations 38 to 52; Hoffman et al. 2013, section 2. What a model knows are natural
parameters lambda = zeta + x: its prior's, and the expected sufficient statistics of the examples.
A natural-gradient step on the evidence lower bound of a mini-batch of G of n examples is

    lambda <- lambda + eta (zeta + n / G sum E[t] - lambda),   that is,   x <- x + eta (n / G sum E[t] - x)

(equations 50 and 52), which is plain SGD along ``x - n / G sum E[t]``. So x is what replicas exchange, as
they would the parameters of a net: a table of rows, few of which a mini-batch may have to do with (``Rows``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from murmurate.datasets.interface import ExampleSet
from murmurate.replica.sparse import Rows
from murmurate.replica.vector import Replica
from murmurate.spec import Batch, Outcome

Found = TypeVar("Found", covariant=True)

StepRule = Literal["robbins-monro", "average", "paper"]
_REFRESH_UPDATES = 1_000  # after which what a table keeps twice is computed anew
_VALIDATION = 500  # examples that are looked at on the way


class ConjugateModel(Protocol[Found]):
    """A module whose one parameter is the table x [R, W] (see above), and what it makes of examples."""

    label: str  # of its replica: a key of checkpoints

    @property
    def width(self) -> int:
        """W."""
        ...

    def expected(self, x: Tensor, scale: float, examples: Any, /) -> Any:
        """What the E-step on ``examples`` needs of lambda = zeta + scale x: E[log beta], and so on
        (equation 44). Others may write to ``x`` meanwhile; a copy is returned."""
        ...

    def statistics(
        self, expected: Any, examples: Any, weight: float, /
    ) -> tuple[Rows, dict[str, Tensor | float]]:
        """(``weight`` sum E[t] over the examples, in the rows that they touch; metrics by name)."""
        ...

    def bound(self, x: Tensor, examples: Any, /) -> tuple[Tensor, float]:
        """(each example's terms of the evidence lower bound at its best local parameters [G] float64, the
        global parameters' own: E[log p(beta) - log q(beta)]), at lambda = zeta + x."""
        ...

    def refresh(self, x: Tensor, /) -> None:
        """Compute anew what the table keeps although it follows from the rest: sums drift."""
        ...

    def found(self, x: Tensor, /) -> Found:
        """What is known at lambda = zeta + x."""
        ...

    def judged(self, x: Tensor, examples: Any, /) -> dict[str, float]:
        """How well that foretells examples that were kept back, by the metric's name."""
        ...


class ConjugateLearner(Generic[Found]):
    """One replica of a model (see ``Learner``).

    Args:
        model: on its device, at its start; all replicas begin alike.
        examples: n. eta: step at update t, before a strategy scales it.
        validation: kept back; looked at every ``validate_every`` own updates, or never if that is 0.
    """

    def __init__(
        self,
        model: ConjugateModel[Found],
        replicate: Callable[..., Replica],
        *,
        examples: int,
        eta: Callable[[int], float],
        validation: ExampleSet[Any] | None = None,
        validate_every: int = 0,
    ) -> None:
        self.model, self.examples, self.eta = model, examples, eta
        few = 0 if validation is None or not validate_every else min(len(validation), _VALIDATION)
        self._validation = None if validation is None or few == 0 else validation.select(range(few))
        self._validate_every = validate_every
        self._judged: dict[str, float] = {}
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
            # while nobody multiplies the scale in, which would leave some of it in other units
            with torch.no_grad(), self.replica.scale.rewriting():
                self.model.refresh(self._table())
        told = self.follow(batch.data)
        metrics: dict[str, Tensor | float] = {"eta": self.eta(self.replica.steps_taken() - 1), **told}
        if self._validation is not None and self.clock % self._validate_every == 0:
            self._judged = self.model.judged(self.values(), self._validation)
        metrics.update(self._judged)
        return Outcome(metrics)

    def follow(self, examples: Any) -> dict[str, Tensor | float]:
        """One step along x - n / G sum E[t]; what the model tells of it."""
        x = self._table()
        seen = self.replica.scale.read_consistently(lambda scale: self.model.expected(x, scale, examples))
        rows, told = self.model.statistics(seen, examples, self.examples / max(len(examples), 1))
        self.replica.follow(Rows(rows.row.to(x.device), rows.values.to(x.device), rows.shrink))
        return told

    def elbo(self, examples: Any) -> float:
        """The evidence lower bound of all n examples, of which these are a sample (equation 51)."""
        each, whole = self.model.bound(self.values(), examples)
        return float(each.sum()) * self.examples / len(examples) + whole

    def found(self) -> Found:
        """What is known now."""
        return self.model.found(self.values())

    def values(self) -> Tensor:
        """[R, W] x, its scale multiplied out."""
        return self.replica.values().detach().view(-1, self.model.width)

    def _table(self) -> Tensor:
        return self.replica.params.detach().view(-1, self.model.width)

    # -- state --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass


def step_size(t: int, rule: StepRule, *, rate: float, delay: float, forgetting: float) -> float:
    """eta after ``t`` updates: (delay + t) ** -forgetting under Robbins-Monro's rule, else ``rate``."""
    return float((delay + t) ** -forgetting) if rule == "robbins-monro" else rate


def check_steps(*, rate: float, delay: float, forgetting: float) -> None:
    """Raise ValueError for steps that make no sense."""
    if not 0 < rate < 1:
        raise ValueError(f"rate is {rate}; a step towards lambda-hat lies between 0 and 1")
    if not (delay >= 1 and 0 <= forgetting <= 1):
        raise ValueError(
            f"delay is {delay:g} and forgetting {forgetting:g}; delay is at least 1, so that the first step "
            "is not longer than the way to lambda-hat, and forgetting between 0 and 1"
        )
