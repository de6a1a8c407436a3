"""Arguments of ``murmurate.train`` for short runs."""

from __future__ import annotations

from typing import Any

SHORT: dict[str, Any] = {"launcher": "inline", "simulators": 2, "eval_episodes": 1, "quiet": True}
