"""Saves and restores the replicas of a script; a resume from states that do not fit is refused."""

from __future__ import annotations

from typing import Any

from murmurate.errors import Refusal
from murmurate.fabric.interface import FabricError
from murmurate.replicator.comparison import require_equal
from murmurate.replicator.measured_loop import MeasuredLoop


class ResumableLoop(MeasuredLoop):
    """A script's replicator whose saved state names the run: the strategy and the number of replicas.

    Of the parts of a replica the first alone has the state of optimizer and strategy, as it makes the steps.
    """

    def state(self) -> dict[str, Any]:
        """The state of all replicas and their strategies, by name: nested tensors and plain values, to be
        saved. Raises Refusal under a strategy with a centre, and on all parts of a replica but the first: a
        run could not go on from it."""
        self._refuse_centre()
        if self.parts.rank:
            raise Refusal(
                "state() of a replica of several parts is that of its first part, which makes the steps: "
                "save it where replicator.parts.rank is 0, and load that file on all parts of the replica."
            )
        state = super().state()
        run = {"strategy": self.strategy.name, "replicas": self.size}
        return {name: saved | {"run": run} for name, saved in state.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned.

        Raises Refusal, before any change, under a strategy with a centre, for a state of another strategy or
        number of replicas, or without one of this script's replicas. A state that names neither strategy nor
        number, as an earlier version saved it, is accepted. All parts of a replica load that of the first.
        """
        self._refuse_centre()
        own = {"strategy": self.strategy.name, "replicas": self.size}
        for name in self.bound_replicas:
            if name not in state:
                found = ", ".join(map(repr, state)) or "nothing"
                raise Refusal(
                    f"the state has no replica '{name}', but {found}: load what replicator.state() returned, "
                    "in a script that wraps the same optimizers."
                )
            saved = state[name].get("run", own)
            if saved != own and not self.parts.rank:
                raise Refusal(
                    f"the state was saved under {saved['strategy']} with {saved['replicas']} replicas, and "
                    f"this run is {self.strategy.name} with {self.size}: resume with the same. To change "
                    "them, save agreed(), and load it into the model before wrapping."
                )
        super().load(state)

    def _refuse_centre(self) -> None:
        # a new centre has the initial parameters, and would overwrite or pull back what the replicas load
        if self.strategy.centre:
            raise Refusal(
                f"state() and load() are of replicas alone, and under {self.strategy.name} the centre has "
                "a state of its own, without which the run cannot go on. Save agreed(), and load it into the "
                "model before wrapping."
            )

    def resumed(self) -> None:
        """To be called by all replicas when they have loaded their states, and before their first steps.

        Raises Refusal if replicas that take part in the same rounds have made different numbers of updates,
        FabricError if another of them does not call it.
        """
        if self.strategy.synchronous and self.size > 1 and self.rank < self.size:
            updates = {f"updates of '{k}'": str(b.replica.clock) for k, b in self.bound_replicas.items()}
            try:
                require_equal(
                    self._exchange(range(self.size)),
                    "the updates at a resume",
                    updates,
                    "the replicas resume from different steps",
                    "Let each load the state that it saved at the same step as the others.",
                )
            except FabricError as error:
                raise FabricError(
                    f"{error} Call resumed() on all replicas or on none: has each a saved state?"
                ) from error
        super().resumed()
