"""Benchmarks against other libraries and against physical limits, one file each.

A benchmark is a module with ``NAME``, ``SUMMARY``, two instances ``QUICK`` and ``FULL`` of a frozen dataclass
that says how much to measure, and ``measure(plan, log) -> dict``. Files whose names begin with an underscore
are shared by several benchmarks.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from murmurate.bench._result import header, progress_log, show
from murmurate.errors import unknown


def benches() -> dict[str, ModuleType]:
    """Every benchmark by its command-line name."""
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return dict(sorted((module.NAME, module) for module in modules))


def benchmark(name: str) -> ModuleType:
    """The benchmark of that name. Raises Refusal."""
    known = benches()
    if name not in known:
        raise unknown("bench", name, known)
    return known[name]


def bench(
    name: str,
    *,
    full: bool = False,
    table: bool = True,
    options: Sequence[str] = (),
    change: Callable[[Any, Sequence[str]], Any] = lambda plan, options: plan,
) -> dict[str, Any]:
    """Run a benchmark and return its result as plain JSON values, with date, command, hardware and versions.

    full: measure longer, with more repetitions and all peers. Progress goes to standard error, and a table
    to standard output if ``table``. options: command-line options; ``change(plan, options)`` returns the plan
    (how much to measure) with them applied. Raises Refusal for an unknown name.
    """
    module = benchmark(name)
    plan = change(module.FULL if full else module.QUICK, options)
    measured = module.measure(plan, progress_log())
    result = {**header(name, full, options), **measured, "plan": dataclasses.asdict(plan)}
    if table:
        show(result)
    return result
