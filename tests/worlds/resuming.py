"""The players of the conformance tests of worlds."""

from __future__ import annotations

from murmurate.conformance.simulators import assert_resumes_exactly, drawn_actions, play, same_steps

__all__ = ["assert_resumes_exactly", "drawn_actions", "play", "same_steps"]
