"""Hostile input, drawn anew each time: arguments, run folders, corpora, texts, and bytes at a live fabric.

No input may end in a traceback or a hang, or take much memory. No run folder may be loaded as other values
than were saved, no message taken with other values than were sent, no corpus with values that none may have.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from murmurate.bench import _fuzz_arguments, _fuzz_corpora, _fuzz_folders, _fuzz_network, _fuzz_texts
from murmurate.bench._result import Log
from murmurate.ranges import NonNegativeInt, Seed

NAME = "fuzz"
SUMMARY = (
    "random arguments, damaged run folders, corpora and texts, hostile bytes: tracebacks, hangs, silent loads"
)


@dataclass(frozen=True)
class FuzzPlan:
    """How many inputs of each kind are tried. seed: seed of the draws; None: a random one.

    arguments: number of command lines. folders: number of damaged run folders. corpora: number of damaged
    corpora and tables. texts: number of damaged files of CSV, JSON lines or Markdown. network: number of
    attacks on a live fabric.
    """

    arguments: NonNegativeInt = 100
    folders: NonNegativeInt = 100
    corpora: NonNegativeInt = 100
    texts: NonNegativeInt = 100
    network: NonNegativeInt = 100
    seed: Seed | None = None


QUICK, FULL = FuzzPlan(), FuzzPlan(arguments=2000, folders=2000, corpora=500, texts=500, network=500)
_PARTS = {
    "arguments": _fuzz_arguments,
    "folders": _fuzz_folders,
    "corpora": _fuzz_corpora,
    "texts": _fuzz_texts,
    "network": _fuzz_network,
}


def measure(plan: FuzzPlan, log: Log) -> dict[str, Any]:
    """Counts of outcomes, by part."""
    seed = random.SystemRandom().randrange(2**31) if plan.seed is None else plan.seed
    result: dict[str, Any] = {"seed": seed}
    for name, part in _PARTS.items():
        count = getattr(plan, name)
        if not count:
            continue
        log(f"{name}: {count} attempts, seed {seed}")
        result[name] = part.attack(count, seed)
    return result
