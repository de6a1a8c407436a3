"""Callbacks: the user's objects, whose methods are called with the records of a run while it goes on."""

from __future__ import annotations

import contextlib
import difflib
import enum
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from murmurate.errors import Refusal, RunFailed


class Stop(enum.Enum):
    """The type of ``STOP``."""

    STOP = "stop"


STOP: Final = Stop.STOP
"""Returned by a callback's method: the run saves a checkpoint and ends, as at its planned end."""


@dataclass(frozen=True)
class Result:
    """How a run ended.

    folder: folder of the run. summary: what is in its ``summary.json`` (``docs/metrics.md``); empty in a
    process that does not lead the run (torchrun). code: the exit code of the command line; 0: finished.
    """

    folder: Path
    summary: Mapping[str, Any]
    code: int = 0


class Callback:
    """A base class of callbacks; override the methods that you need.

    New records are looked for a few times a second, and a method is called for each, in the process that
    launched the run. The run's bookkeeping (checkpoints, deaths, the end of the run) waits for it; the
    learners do not, unless they are in that process (launcher ``inline``, ``murmurate.simulate``). A method
    that raises ends the run as ``STOP`` does, with exit code 1 and the method's name in the error; that
    callback is not called again, not even ``on_end``. After a resume, only new records are passed.
    """

    def on_record(self, record: Mapping[str, Any]) -> Stop | None:
        """A line of ``metrics.jsonl`` that is neither an evaluation nor an event: a replica's, or a centre's
        (``kind``; fields: ``docs/metrics.md``)."""
        return None

    def on_evaluation(self, record: Mapping[str, Any]) -> Stop | None:
        """The record of an evaluation during training."""
        return None

    def on_event(self, record: Mapping[str, Any]) -> Stop | None:
        """An event: ``event`` of the record is its name (died, joined, ...), ``message`` a sentence."""
        return None

    def on_checkpoint(self, folder: Path) -> Stop | None:
        """A complete checkpoint. It stays in ``folder`` until the next one replaces it."""
        return None

    def on_end(self, result: Result) -> None:
        """The run has ended, and its summary is written."""


_METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def checked(callbacks: Iterable[Any]) -> tuple[Any, ...]:
    """``callbacks`` as a tuple; they need not inherit from ``Callback``.

    Raises Refusal for a callback outside of a list, one that has none of the methods of ``Callback``, or an
    unknown method whose name begins with ``on_``.
    """
    if not isinstance(callbacks, Iterable):
        raise Refusal(f"callbacks is a {type(callbacks).__name__}: pass a list, as in callbacks=[...].")
    callbacks = tuple(callbacks)  # a generator can be read only once
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, type):
            name = callback.__name__
            raise Refusal(f"{name} is a class: pass an object of it, as in callbacks=[{name}()].")
        names = [method for method in dir(callback) if method.startswith("on_")]
        methods = [method for method in names if callable(getattr(callback, method, None))]
        if not methods:
            raise Refusal(f"{name} is no callback: it has none of the methods {', '.join(_METHODS)}.")
        for method in methods:
            if method not in _METHODS:
                similar = difflib.get_close_matches(method, _METHODS, n=1)
                hint = f"Did you mean {similar[0]}?" if similar else f"There are {', '.join(_METHODS)}."
                raise Refusal(f"{name}.{method} would never be called. {hint}")
    return callbacks


@dataclass(frozen=True)
class Watch:
    """What the process that launches a run does with its records. quiet: print no progress."""

    callbacks: tuple[Any, ...] = ()
    quiet: bool = False


_UNWATCHED = Watch()
_watch: ContextVar[Watch] = ContextVar("murmurate_watch", default=_UNWATCHED)


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Within this context, the runs that this process launches are watched as ``watch`` says."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def current_watch() -> Watch:
    return _watch.get()


class Callbacks:
    """The callbacks of one run.

    since_seconds: only records of a later ``time_seconds`` are passed on, as others were written before a
    resume; 0: all. error: exception of the first method that raised. failure: a sentence about it.
    """

    def __init__(self, callbacks: Iterable[Any], since_seconds: float = 0.0) -> None:
        self._callbacks = list(callbacks)
        self._since = since_seconds
        self.error: Exception | SystemExit | None = None
        self.failure = ""

    def __bool__(self) -> bool:
        """Whether any is left to call."""
        return bool(self._callbacks)

    def records(self, records: Iterable[Mapping[str, Any]]) -> str:
        """Pass on records. Returns why the run is to stop; empty if it goes on."""
        if not self._callbacks:
            return ""
        why = ""
        method_by_kind = {"event": "on_event", "evaluation": "on_evaluation"}
        for record in records:
            if not self._since or record["time_seconds"] > self._since:
                method = method_by_kind.get(str(record.get("kind")), "on_record")
                new_reason = self._call_all(method, record)
                why = why or new_reason
        return why

    def checkpoint(self, folder: Path) -> str:
        """Pass on a checkpoint. Returns why the run is to stop, as ``records`` does."""
        return self._call_all("on_checkpoint", folder)

    def end(self, result: Result) -> None:
        """Pass on the end. Raises RunFailed if a method raises now, and none has before."""
        failed_before = self.failure
        self._call_all("on_end", result)
        if self.failure and not failed_before:
            raise RunFailed(f"{self.failure}. The run itself is complete in {result.folder}.") from self.error

    def _call_all(self, method: str, argument: Any) -> str:
        why = ""
        for callback in self._callbacks:
            name = f"{type(callback).__name__}.{method}"
            try:
                returned = getattr(callback, method, lambda _: None)(argument)
            except (Exception, SystemExit) as error:  # sys.exit() must not leave a run that is not saved
                # by identity: callbacks may be equal, or not comparable
                self._callbacks = [other for other in self._callbacks if other is not callback]
                if self.error is None:
                    self.error = error
                    self.failure = f"the callback {name} raised {type(error).__name__}: {error}"
                why = self.failure
                continue
            if returned is STOP:
                why = why or f"the callback {name} stopped the run"
        return why
