"""What every result contains, how repeated measurements are summarised, and how a result is printed."""

from __future__ import annotations

import importlib.metadata
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import rich.console
import rich.table

from murmurate.training.host import hardware, versions

Log = Callable[[str], None]
_LEAST_WIDTH = 120
# keys that are in the JSON but not in the table: raw data, or printed elsewhere
_NOT_IN_TABLE = frozenset({"windows", "limit_windows", "raw", "plan", "peers", "hardware", "versions"})


def header(name: str, full: bool, options: Sequence[str] = ()) -> dict[str, Any]:
    """Date, command, hardware and versions, which every published figure needs. options: the options that
    changed the plan."""
    words = ["murmurate", "bench", name, "--json", *(["--full"] if full else []), *options]
    return {
        "bench": name,
        "full": full,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(words),
        "hardware": hardware(),
        "versions": {**versions(), "stable-baselines3": version("stable-baselines3")},
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and quartiles of repeated measurements, and the values in the order taken."""
    ordered = sorted(values)
    low, middle, high = (
        statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    )
    return {
        "median": middle,
        "least": ordered[0],
        "greatest": ordered[-1],
        "quartiles": [low, high],
        "repetitions": len(values),
        "values": list(values),
    }


def spreads(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """``spread`` of each key over ``rows``."""
    return {key: spread([row[key] for row in rows]) for key in rows[0]}


def mean(values: Sequence[float]) -> float | None:
    """None without values, as where all runs diverged."""
    return statistics.fmean(values) if values else None


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Quotients of values measured in the same rounds: whatever slows down both of a pair cancels out."""
    return [a / b for a, b in zip(values, others, strict=True)]


def progress_log() -> Log:
    """Prints progress lines to standard error, with seconds since the start."""
    start = time.monotonic()

    def log(line: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {line}", file=sys.stderr, flush=True)

    return log


def show(result: dict[str, Any]) -> None:
    """Print the figures as a table (spreads as median and extremes), and texts and peers as lines."""
    console = rich.console.Console()
    # a narrow terminal wraps lines rather than truncating names and numbers
    console.width = max(console.width, _LEAST_WIDTH)
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("least to greatest (windows)", no_wrap=True)
    for name, value in _flatten({k: v for k, v in result.items() if k not in _NOT_IN_TABLE}):
        if isinstance(value, dict):
            extremes = f"{format_number(value['least'])} to {format_number(value['greatest'])}"
            table.add_row(name, format_number(value["median"]), f"{extremes} ({value['repetitions']})")
        elif isinstance(value, str):
            console.print(f"{name}: {value}", style="dim", highlight=False, markup=False)
        else:
            table.add_row(name, format_number(value), "")
    console.print(table)
    for peer in result.get("peers", []):
        console.print(f"peer {peer['peer']}: {peer['status']}", highlight=False, markup=False)


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, plain value or spread) for everything in a result, depth first."""
    if isinstance(value, dict) and "values" in value and "median" in value:
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flatten(inner, f"{name}[{index}]")
    else:
        yield name, value


def format_number(value: Any) -> str:
    """Integers and numbers from 1,000 on without decimals, with thousands separators; others with four
    significant digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
