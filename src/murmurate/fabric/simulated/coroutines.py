"""Two kinds of context for the scheduler: greenlets of one thread, or threads of which one runs at a time.

Greenlets are cheaper (docs/decisions/0013). But autograd's engine keeps what it is doing by thread, so a
greenlet must not give control away inside a backward pass; where collectives are differentiated, each
context has to be a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol

import greenlet

Kind = Literal["greenlets", "threads"]


class Context(Protocol):
    """Something to be switched to; at its end control goes to its hub."""

    def has_begun(self) -> bool: ...
    def take_over(self, giver: Any) -> None:
        """Run from here on; ``giver``, of the same kind and running, goes on when it is switched to again."""
        ...


class GreenletContext:
    """A greenlet of the thread that made it. Without ``act``: what is running."""

    def __init__(self, act: Callable[[], None] | None = None, hub: GreenletContext | None = None) -> None:
        if act is None or hub is None:
            self._greenlet = greenlet.getcurrent()
        else:
            self._greenlet = greenlet.greenlet(act, hub._greenlet)

    def has_begun(self) -> bool:
        return bool(self._greenlet)

    def take_over(self, giver: GreenletContext) -> None:
        self._greenlet.switch()


class ThreadContext:
    """A thread that runs only while it has control. Without ``act``: the thread that is there.

    Whoever calls the fabric for a member holds that member's control, also from a thread of its own.
    """

    def __init__(self, act: Callable[[], None] | None = None, hub: ThreadContext | None = None) -> None:
        self._control = threading.Lock()
        self._control.acquire()
        self._act, self._hub = act, hub
        self._thread = None if act is None else threading.Thread(target=self._go, daemon=True)

    def has_begun(self) -> bool:
        return self._thread is None or self._thread.ident is not None

    def take_over(self, giver: ThreadContext) -> None:
        if self._thread is not None and self._thread.ident is None:
            self._thread.start()
        else:
            self._control.release()
        giver._control.acquire()

    def _go(self) -> None:
        if self._act is not None and self._hub is not None:
            self._act()
            self._hub._control.release()


def hub(kind: Kind) -> Any:
    """What is running, as a context."""
    return GreenletContext() if kind == "greenlets" else ThreadContext()


def context(kind: Kind, act: Callable[[], None], around: Any) -> Context:
    """One that runs ``act`` when it is first switched to, and the hub ``around`` after that."""
    return GreenletContext(act, around) if kind == "greenlets" else ThreadContext(act, around)
