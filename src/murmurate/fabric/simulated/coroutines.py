"""Two kinds of coroutines for the scheduler: greenlets of one thread, or threads of which one runs at a time.

Greenlets are cheaper (docs/decisions/0013). But autograd's engine keeps its state for each thread, so a
greenlet must not yield inside a backward pass; where collectives are differentiated, each coroutine must be a
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol

import greenlet

CoroutineKind = Literal["greenlets", "threads"]


class Coroutine(Protocol):
    """A coroutine. When it ends, its hub (the coroutine that runs the scheduler) continues."""

    def has_begun(self) -> bool: ...
    def switch_from(self, current: Any) -> None:
        """Run this coroutine instead of ``current``, the running one (of the same kind), which continues when
        it is switched to."""
        ...


class GreenletCoroutine:
    """A greenlet of the thread that makes it. Without ``act`` it represents the running greenlet."""

    def __init__(self, act: Callable[[], None] | None = None, hub: GreenletCoroutine | None = None) -> None:
        if act is None or hub is None:
            self._greenlet = greenlet.getcurrent()
        else:
            self._greenlet = greenlet.greenlet(act, hub._greenlet)

    def has_begun(self) -> bool:
        return bool(self._greenlet)

    def switch_from(self, current: GreenletCoroutine) -> None:
        self._greenlet.switch()


class ThreadCoroutine:
    """A thread that runs only while it has control. Without ``act`` it represents the running thread.

    Only the thread that has a member's control may call the fabric for that member.
    """

    def __init__(self, act: Callable[[], None] | None = None, hub: ThreadCoroutine | None = None) -> None:
        self._control = threading.Lock()
        self._control.acquire()
        self._act, self._hub = act, hub
        self._thread = None if act is None else threading.Thread(target=self._run, daemon=True)

    def has_begun(self) -> bool:
        return self._thread is None or self._thread.ident is not None

    def switch_from(self, current: ThreadCoroutine) -> None:
        if self._thread is not None and self._thread.ident is None:
            self._thread.start()
        else:
            self._control.release()
        current._control.acquire()

    def _run(self) -> None:
        if self._act is not None and self._hub is not None:
            self._act()
            self._hub._control.release()


# by kind: the class, called with nothing for the running coroutine, or with ``act``, which a coroutine calls,
# and the hub that continues after it
COROUTINES: dict[CoroutineKind, Any] = {"greenlets": GreenletCoroutine, "threads": ThreadCoroutine}
