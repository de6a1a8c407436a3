"""What every result carries, how spreads are given, and how a result is shown."""

from __future__ import annotations

import importlib.metadata
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import rich.console
import rich.table

from murmurate.training.run_folder import hardware, versions

Log = Callable[[str], None]
_PACKAGES = ("numpy", "gymnasium", "ale-py", "stable-baselines3")


def header(name: str, full: bool) -> dict[str, Any]:
    """Date, command, hardware and versions: no figure is published without them."""
    return {
        "bench": name,
        "full": full,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": f"murmurate bench {name} --json{' --full' * full}",
        "hardware": hardware(),
        "versions": {**versions(), **{package: version(package) for package in _PACKAGES}},
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


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def teller(quiet: bool) -> Log:
    """Progress lines on standard error, with seconds since the start; or silence."""
    start = time.monotonic()

    def log(line: str) -> None:
        if not quiet:
            print(f"{time.monotonic() - start:6.1f} s  {line}", file=sys.stderr, flush=True)

    return log


def show(result: dict[str, Any]) -> None:
    """The figures of a result as a table; spreads as median and extremes, texts and peers as lines."""
    console = rich.console.Console()
    # a cut name or number is of no use: rather let a narrow terminal wrap the line
    console.width = max(console.width, _WIDTH)
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("least to greatest (windows)", no_wrap=True)
    for name, value in rows({k: v for k, v in result.items() if k not in _MATERIAL}):
        if isinstance(value, dict):
            around = f"{number(value['least'])} to {number(value['greatest'])} ({value['repetitions']})"
            table.add_row(name, number(value["median"]), around)
        elif isinstance(value, str):
            console.print(f"{name}: {value}", style="dim", highlight=False)
        else:
            table.add_row(name, number(value), "")
    console.print(table)
    for peer in result.get("peers", []):
        console.print(f"peer {peer['peer']}: {peer['status']}", highlight=False)


_WIDTH = 120
# in the JSON only: what the figures were made from, and what has lines of its own
_MATERIAL = frozenset({"windows", "limit_windows", "plan", "peers", "hardware", "versions"})


def rows(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, plain value or spread) for everything in a result, depth first."""
    if isinstance(value, dict) and "values" in value and "median" in value:
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from rows(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from rows(inner, f"{name}[{index}]")
    else:
        yield name, value


def number(value: Any) -> str:
    """Four significant digits, with thousands set apart."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
