"""After which updates of a replica a learner of examples is validated."""

from __future__ import annotations

from dataclasses import dataclass

from murmurate.replicator.learner import Context

_LEAST_VALIDATIONS = 20  # of a run whose number of updates is known


@dataclass(frozen=True)
class ValidationTimes:
    """every: updates between two validations. last: the replica's last update, after which it is validated
    too; None if that is not known."""

    every: int
    last: int | None = None

    def passed(self, before: int, after: int) -> bool:
        """Whether a validation is due after one of the updates from ``before`` to ``after``."""
        is_last = self.last is not None and before < self.last <= after
        return is_last or before // self.every != after // self.every

    @classmethod
    def of(cls, context: Context, every: int, batch: int, most: int | None = None) -> ValidationTimes | None:
        """Every ``every`` updates; more often in a short run, so that its figures show how it goes, but not
        before as many examples were learned from as are validated. None: never, as there are no validation
        examples, or ``every`` is 0.

        batch: examples of an update. most: how many examples are validated at most.
        """
        available = 0 if context.validation is None else len(context.validation)
        if not available or not every:
            return None
        updates = context.own_updates
        if updates is None:
            return cls(every)
        validated = available if most is None else min(available, most)
        return cls(min(every, max(1, updates // _LEAST_VALIDATIONS, validated // batch)), max(1, updates))
