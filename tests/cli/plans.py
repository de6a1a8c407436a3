"""What tests of ``murmurate plan`` share."""

from __future__ import annotations

import pytest

from murmurate.mapping import measure

Capture = pytest.CaptureFixture[str]


def without_measuring_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each other size is another question, whose answer takes seconds."""
    monkeypatch.setattr(measure, "_threads_pay", lambda *_: False)
