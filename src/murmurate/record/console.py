"""The live display of a run in a terminal; without one, or with TERM=dumb, plain lines every ten seconds."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import rich.console
from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from murmurate.errors import cause_of, printable
from murmurate.record.progress import Progress, ReplicaProgress

PLAIN_INTERVAL_SECONDS = 10.0
SILENT_AFTER_SECONDS = 15.0
SHOWN_EVENTS = 5
SHOWN_REPLICAS = 16
WIDE_COLUMNS = 104
_STYLES = {"starting": "dim", "running": "green", "silent": "yellow", "finished": "cyan", "dead": "red"}
_EVENT_STYLES = {
    "evaluation": "green",
    "died": "red",
    "warning": "yellow",
    "checkpoint": "dim",
    "resumed": "cyan",
}
_STOPPED_BY_SIGNAL = ("stopping: SIGINT", "stopping: SIGTERM")
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"


class Console:
    """Shows a run's records: a row for each replica, a total with ETA, the mean return's curve, events.

    Use it as a context manager; call ``feed`` with the records that a ``Tail`` polled, and ``refresh``
    regularly (it updates the time on screen and prints the plain lines). ``elapsed`` returns the seconds
    since the run began (default: since this object was made), on the clock of the records' ``time_seconds``.
    ``target_env_steps``, ``target_updates`` (of each replica), ``target_seconds``: where the run ends; the
    nearest counts.
    ``unit``: unit of env steps. ``curves``: metrics to print (see ``evaluation.interface.Curve``). ``quiet``:
    show nothing, where no ``console`` is given.

    Where its stream fails (the reader of a pipe has ended, the disk is full), it warns once and shows nothing
    from then on: what is shown of a run must not end it.
    """

    def __init__(
        self,
        run_title: str,
        replicas: int,
        target_env_steps: int | None = None,
        *,
        unit: str = "env steps",
        curves: Sequence[Any] = (),
        target_updates: int | None = None,
        target_seconds: float | None = None,
        console: rich.console.Console | None = None,
        elapsed: Callable[[], float] | None = None,
        interval_seconds: float = PLAIN_INTERVAL_SECONDS,
        quiet: bool = False,
    ) -> None:
        started = time.monotonic()
        self.title = run_title
        self.progress = Progress(replicas)
        self.target_env_steps = target_env_steps
        self.target_updates = target_updates
        self.target_seconds = target_seconds
        self._unit = unit
        self._curves = curves
        self._elapsed = elapsed or (lambda: time.monotonic() - started)
        self._console = console or rich.console.Console(quiet=quiet)
        self._interval = interval_seconds
        self._began = self._elapsed()  # above 0 in a resumed run, whose earlier events are not printed again
        self._next_line = self._began + interval_seconds
        self._next_checkpoint = 0.0
        self._live: Live | None = None

    def __enter__(self) -> Console:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self.render(), console=self._console, auto_refresh=False)
            with self._tolerant():
                self._live.start()
        else:
            self._print(self.title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show_live()
        if self._live is not None:
            with self._tolerant():
                self._live.stop()
            self._live = None
        else:
            self._print(self.line())

    def feed(self, records: Iterable[Mapping[str, Any]], env_steps: int = 0) -> None:
        """Add records. env_steps: what all replicas have taken by now, also for batches that are not
        complete, of which there is no record yet."""
        events = self.progress.feed(records)
        self.progress.counted = env_steps
        if self._live is None:
            for event in events:
                if event["time_seconds"] < self._began:
                    continue
                if event.get("event") == "checkpoint" and not self._checkpoint_is_due(event):
                    continue
                self._print(f"[{clock(event['time_seconds'])}] {_message(event)}")

    def _checkpoint_is_due(self, event: Mapping[str, Any]) -> bool:
        """Whether to print a checkpoint: at most one in the time between two lines of progress, since a fast
        run saves several times a second."""
        if event["time_seconds"] < self._next_checkpoint:
            return False
        self._next_checkpoint = event["time_seconds"] + self._interval
        return True

    def refresh(self) -> None:
        if self._live is not None:
            self._show_live()
        elif self._elapsed() >= self._next_line:
            self._next_line = self._elapsed() + self._interval
            self._print(self.line())

    def line(self) -> str:
        """The run's progress in one line of ASCII."""
        progress = self.progress
        parts = [f"[{clock(self._seconds())}] {progress.env_steps:,} {self._unit}{self._percent()}"]
        if (rate := progress.env_steps_per_second) is not None:
            parts.append(f"{rate:,.0f}/s")
        if progress.return_mean is not None:
            parts.append(f"return {_number(progress.return_mean)}")
        if (success := progress.number("success_rate")) is not None:
            parts.append(f"success {success:.0%}")
        for curve in self._curves:
            if (value := progress.best(curve.metric, curve.lower_is_better)) is not None:
                parts.append(f"{curve.title.lower()} {value:,.{curve.digits}f}")
        if (staleness := progress.number("staleness")) is not None:
            parts.append(f"staleness {staleness:.0f}")
        if (disagreement := progress.number("disagreement")) is not None:
            parts.append(f"disagreement {_scientific(disagreement)}")
        if (dead := [r.replica for r in progress.replicas if r.dead]) != []:
            parts.append(f"dead {dead}")
        if (eta := self._eta()) is not None:
            parts.append(f"ETA {clock(eta)}")
        return ", ".join(parts)

    def render(self) -> RenderableType:
        """The whole display, fitted to the console's width."""
        parts: list[RenderableType] = [self._table(), self._bar()]
        if (curve := self._curve()) is not None:
            parts.append(curve)
        if self.progress.events:
            parts += [Rule(style="dim"), *(self._event(e) for e in self.progress.events[-SHOWN_EVENTS:])]
        return Panel(
            Group(*parts),
            box=box.ROUNDED,
            border_style="dim",
            title=Text(f" {self.title} ", style="bold"),
            title_align="left",
            subtitle=Text(f" {clock(self._seconds())} ", style="dim"),
            subtitle_align="right",
            padding=(0, 1),
        )

    def _table(self) -> Table:
        wide = self._console.width >= WIDE_COLUMNS
        table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), header_style="dim", pad_edge=False)
        table.add_column("replica" if wide else "#", justify="right", no_wrap=True)
        table.add_column("state", no_wrap=True, min_width=8)
        for _, wide_name, narrow_name, _ in self._columns(wide):
            table.add_column(wide_name if wide else narrow_name, justify="right", no_wrap=True)
        replicas = self.progress.replicas
        # where not all fit, dead replicas are shown before living ones
        shown = sorted(sorted(replicas, key=lambda r: not r.dead)[:SHOWN_REPLICAS], key=lambda r: r.replica)
        for replica in shown:
            state = replica.state(self._seconds(), SILENT_AFTER_SECONDS)
            style = _STYLES[state.split()[0]]
            row_style = "dim" if replica.dead else ""
            cells = self._cells(replica, wide)
            table.add_row(str(replica.replica), Text(state, style=style), *cells, style=row_style)
        if len(shown) < len(replicas):
            table.add_row("", Text(f"and {len(replicas) - len(shown)} more", style="dim"))
        table.add_section()
        table.add_row(
            "all", Text(f"{len(self.progress.living)} alive"), *self._cells(self.progress, wide), style="bold"
        )
        return table

    def _cells(self, source: Progress | ReplicaProgress, wide: bool) -> list[str]:
        """The numbers in a replica's row, or in the row of totals."""
        cells = []
        for key, _, _, full_format in self._columns(wide):
            value = source.number(key)
            to_text = _abbreviated if full_format is _integer and not wide else full_format
            cells.append("-" if value is None else to_text(value))
        return cells

    def _columns(self, wide: bool) -> list[_Column]:
        """The columns that are shown: that of successes only if the world has a goal."""
        goal = self.progress.number("success_rate") is not None
        return [
            column for column in _COLUMNS if (wide or column[2]) and (goal or column[0] != "success_rate")
        ]

    def _bar(self) -> Text:
        fraction = self._fraction() or 0.0  # None before the first record of a run that its updates end
        eta = self._eta()
        suffix = f" {fraction:6.1%}   ETA {'--' if eta is None else clock(eta)}"
        width = max(10, self._inner_width() - len(suffix))
        done = round(fraction * width)
        full, empty = ("━", "━") if self._has_unicode() else ("=", "-")
        return Text.assemble((full * done, "green"), (empty * (width - done), "bright_black"), suffix)

    def _curve(self) -> Text | None:
        returns = self.progress.returns
        if len(returns) < 2:
            return None
        suffix = f" {_number(min(returns))} to {_number(max(returns))}"
        head = "return "
        width = max(10, self._inner_width() - len(suffix) - len(head))
        blocks = _BLOCKS if self._has_unicode() else _ASCII_BLOCKS
        return Text.assemble((head, "dim"), (sparkline(returns, width, blocks), "green"), (suffix, "dim"))

    def _event(self, event: Mapping[str, Any]) -> Text:
        style = _EVENT_STYLES.get(str(event.get("event", event.get("kind"))), "")
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"{clock(event['time_seconds'])}  ", style="dim")
        return text.append(printable(_message(event)), style=style)

    def _seconds(self) -> float:
        return max(self._elapsed(), self.progress.seconds)

    def _eta(self) -> float | None:
        return self.progress.eta_seconds(self._target(), self.target_seconds)

    def _fraction(self) -> float | None:
        return self.progress.fraction(self._target(), self.target_seconds)

    def _target(self) -> int | None:
        """The env steps at which the run ends by its env steps or updates; None if neither is known."""
        living, env_steps = self.progress.living, self.progress.env_steps
        updates = sum(int(replica.latest.get("updates", 0)) for replica in living)
        targets = [] if self.target_env_steps is None else [self.target_env_steps]
        if self.target_updates is not None and updates:
            targets.append(math.ceil(env_steps * self.target_updates * len(living) / updates))
        return min(targets, default=None)

    def _percent(self) -> str:
        fraction = self._fraction()
        return "" if fraction is None else f" ({fraction:.1%})"

    def _inner_width(self) -> int:
        return self._console.width - 4

    def _has_unicode(self) -> bool:
        return self._console.encoding.startswith("utf")

    def _show_live(self) -> None:
        if self._live is not None:
            shown = self.render()
            with self._tolerant():
                self._live.update(shown, refresh=True)

    def _print(self, line: str) -> None:
        with self._tolerant():
            self._console.print(Text(printable(line)), soft_wrap=True)

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Turn the display off if its stream fails within."""
        try:
            yield
        except OSError as error:
            self._turn_off(error)
        except SystemExit as end:  # rich ends the process at a broken pipe
            if not isinstance(end.__context__, BrokenPipeError):
                raise
            self._turn_off(end.__context__)

    def _turn_off(self, error: OSError) -> None:
        self._console.quiet = True  # first, so that nothing below writes
        if self._live is not None:
            with contextlib.suppress(IndexError):  # rich removes a hook that a failed start has not set
                self._live.stop()
            self._live = None
        if self._console.file is sys.stdout:  # so that later lines, and what is still buffered, do not fail
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
        warnings.warn(
            f"Nothing more is shown, because the output failed ({cause_of(error)}). The run goes on, "
            "and its folder holds its results.",
            stacklevel=2,
        )


def _message(event: Mapping[str, Any]) -> str:
    message = str(event.get("message", event.get("event", event.get("kind"))))
    # advice for whoever sent the signal, and nothing that the record should keep
    return f"{message}; once more stops without saving" if message in _STOPPED_BY_SIGNAL else message


def clock(seconds: float) -> str:
    """``seconds`` as h:mm:ss."""
    whole_seconds = int(seconds)
    return f"{whole_seconds // 3600}:{whole_seconds // 60 % 60:02d}:{whole_seconds % 60:02d}"


def sparkline(values: Sequence[float], width: int, blocks: str = _BLOCKS) -> str:
    """``values`` averaged into at most ``width`` columns, each drawn as one of ``blocks``, by its height."""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    columns = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(columns), max(columns)
    top = len(blocks) - 1
    return "".join(blocks[round((c - low) / (high - low) * top) if high > low else 0] for c in columns)


def _integer(value: float) -> str:
    return f"{value:,.0f}"


def _abbreviated(value: float) -> str:
    if value < 10_000:
        return f"{value:,.0f}"
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}"


def _scientific(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


# metric, heading in a wide and in a narrow table (empty: not shown there), format
_Column = tuple[str, str, str, Callable[[float], str]]
_COLUMNS: tuple[_Column, ...] = (
    ("env_steps", "env steps", "steps", _integer),
    ("updates", "updates", "", _integer),
    ("env_steps_per_second", "steps/s", "steps/s", _integer),
    ("return_mean", "return (100)", "return", _number),
    ("success_rate", "success", "success", "{:.0%}".format),
    ("staleness", "staleness", "stale", _integer),
    ("disagreement", "disagreement", "disagr.", _scientific),
    ("loss", "loss", "loss", _number),
    ("entropy", "entropy", "", _number),
)
