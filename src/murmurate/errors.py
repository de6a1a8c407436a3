"""Errors that a user can act on. Each message is one or two sentences: the cause, then the remedy."""

from __future__ import annotations

import difflib
import errno
import json
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# error numbers of a disk, quota or largest file size that is used up
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# for each package of Debian and Ubuntu: names of its libraries, as error messages write them
_LIBRARIES = {
    "libegl1 libegl-mesa0 libgl1-mesa-dri": ("EGL",),
    "libgl1": ("GL",),
    "libglu1-mesa": ("GLU",),
    "libosmesa6": ("OSMesa",),
    "libx11-6": ("X11",),
    "libglib2.0-0": ("gthread-2.0", "glib-2.0"),
}
# for each kind of name that ``murmurate list`` shows: its list
_LISTS = {
    "recipe": "recipes",
    "world": "worlds",
    "game": "worlds",
    "strategy": "strategies",
    "launcher": "launchers",
    "bench": "benches",
}


class Refusal(Exception):
    """Refused before anything was changed (exit code 2)."""


class MissingExtra(Refusal):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed. "
            f"Run: pip install 'murmurate[{extra}]'"
        )
        self._arguments = package, extra, purpose

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str, str]]:
        # by default, pickle would pass the message as the only argument
        return MissingExtra, self._arguments


def check_system() -> None:
    """Raises Refusal on Windows, before anything is imported that Windows does not have."""
    if sys.platform == "win32":
        raise Refusal(
            "murmurate does not run on Windows: its replicas share memory and files in ways that only Linux "
            "and macOS offer. Run it under the Windows Subsystem for Linux (WSL 2), or in a container"
        )


def library_advice(problem: BaseException) -> str:
    """Which package to install if ``problem`` is about a missing library of the system; else empty."""
    text = str(problem)
    packages = {
        package
        for package, libraries in _LIBRARIES.items()
        if any(re.search(rf"\b(lib)?{library}(\.so|\b)", text) for library in libraries)
    }
    return f" On Debian and Ubuntu run: apt-get install {' '.join(sorted(packages))}" if packages else ""


class RunFailed(Exception):
    """The run began and cannot go on (exit code 1)."""


def cause_of(error: Exception) -> str:
    """What the system says of ``error`` without the file's name; the error's text where it says nothing. With
    what to do about too many open files."""
    return (getattr(error, "strerror", None) or str(error)) + file_limit(error)


def file_limit(error: BaseException) -> str:
    """What to do if ``error`` is that too many files are open, to be written after it; else empty."""
    too_many = getattr(error, "errno", None) == errno.EMFILE
    return "; raise their limit: ulimit -n 4096" if too_many else ""


def quoted(word: Path | str) -> str:
    """``word`` as it stands in a command that a user copies to a shell."""
    return shlex.quote(str(word))


def printable(text: str) -> str:
    """``text`` with control characters escaped, for a terminal: a run folder may come from somebody else."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def refuse_not_utf8(content: Any, name: str) -> None:
    """Raise Refusal if ``content``, JSON values for a file called ``name``, has a text that UTF-8 cannot
    hold, such as a path in another encoding: a run folder's files are not read back with one."""
    text = json.dumps(content, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[text.rfind('"', 0, error.start) + 1 : text.find('"', error.start)]
        raise Refusal(f"{found} is not UTF-8, so {name} could not be read again. Rename it.") from None


def unknown(kind: str, given: str, known: Iterable[str]) -> Refusal:
    """A refusal of the unknown name ``given``, which suggests the nearest known name, and says where to find
    all of them."""
    names = list(known)
    remedy = f"Run: murmurate list {_LISTS[kind]}" if kind in _LISTS else f"Use one of: {', '.join(names)}"
    return Refusal(f"There is no {kind} called '{given}'.{did_you_mean(given, names)} {remedy}")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A question with the known name that is nearest to ``given``, whatever letters are capital, after a
    space; empty if none is near."""
    by_small = {name.lower(): name for name in sorted(known)}
    similar = difflib.get_close_matches(given.lower(), by_small, n=1, cutoff=0.5)
    return f" Did you mean '{by_small[similar[0]]}'?" if similar else ""


def no_recipe(algorithm: str, world: str, worlds: Iterable[str]) -> Refusal:
    """A refusal of ``algorithm`` for a ``world`` that is none of ``worlds``, for which it has recipes."""
    names = list(worlds)
    similar = difflib.get_close_matches(world, names, n=1, cutoff=0.5)
    hint = f" Did you mean {similar[0]}-{algorithm}?" if similar else ""
    known = ", ".join(f"{name}-{algorithm}" for name in names)
    return Refusal(f"There is no recipe {world}-{algorithm}.{hint} The recipes of {algorithm}: {known}.")
