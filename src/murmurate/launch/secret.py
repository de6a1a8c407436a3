"""The secret that the members of a run on several hosts share: MURMURATE_SECRET."""

from __future__ import annotations

import itertools
import os
import secrets

from murmurate.errors import Refusal

VARIABLE = "MURMURATE_SECRET"
_LEAST_LENGTH = 32  # characters
_LEAST_PAIRS = 20  # different pairs of neighbouring characters; a repeated word has few
SET_IT = f"Set {VARIABLE} to the same on every host, or on none; murmurate secret prints a good one."


def drawn_secret() -> str:
    """A new secret, of 256 random bits."""
    return secrets.token_urlsafe(32)


def user_secret() -> bytes:
    """The secret in the environment; empty if there is none. Raises Refusal if it could be guessed.

    Whoever records the network's traffic can test any number of guesses offline.
    """
    text = os.environ.get(VARIABLE, "")
    if text and weakness(text):
        raise Refusal(f"{VARIABLE} can be guessed: {weakness(text)}. {SET_IT}")
    return text.encode()


def weakness(text: str) -> str:
    """Why the secret ``text`` can be guessed; empty for a good one."""
    if len(text) < _LEAST_LENGTH:
        return f"it has {len(text)} characters, and must have at least {_LEAST_LENGTH}"
    if len({*itertools.pairwise(text)}) < _LEAST_PAIRS:
        return "it repeats itself"
    return ""
