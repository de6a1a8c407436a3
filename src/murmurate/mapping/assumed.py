"""What a plan assumes of runs that learn a model, and what it cannot do for them."""

from __future__ import annotations

from typing import Any

from murmurate.errors import Refusal
from murmurate.mapping.primitives import shape_of
from murmurate.training.run import Run


def check_cycles(run: Run, hosts: int, check: bool) -> None:
    """Raise Refusal for a run that learns a model, if it would be run for seconds (``check``), or simulated
    with several ``hosts``: its fits are many batches apart, and become longer as the run goes on."""
    if run.learner.requires.kind != "model":
        return
    source: Any = run.source
    apart = f"{run.recipe} fits its model every {source.fit_every:,} env steps, and the rate of a few seconds"
    if check:
        raise Refusal(f"{apart} says little of that of the whole run. Leave out --check.")
    if hosts > 1:
        raise Refusal(
            f"{apart} says little: several hosts are simulated for a few updates. Leave out --hosts."
        )


def assumption(run: Run) -> str | None:
    """What the throughput of ``run`` depends on, and was not measured; None if there is nothing."""
    shape = shape_of(run)
    if run.learner.requires.kind != "model" or shape is None:
        return None
    source: Any = run.source
    when = "at the first fit" if run.env_steps is None else "the mean over the run"
    steps = shape.fit_steps * source.fit_batches
    return (
        f"assumed for each fit of the model: {source.mean_transitions(run):,.0f} transitions ({when}) and "
        f"{steps:,.0f} gradient steps; for each rollout: {source.mean_length(run):.3g} steps"
    )
