"""A callback that tests ask what it has been called with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import murmurate


class Seen(murmurate.Callback):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.events: list[Mapping[str, Any]] = []
        self.checkpoints: list[Path] = []
        self.results: list[murmurate.Result] = []

    def on_record(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def on_event(self, record: Mapping[str, Any]) -> None:
        self.events.append(record)

    def on_checkpoint(self, folder: Path) -> None:
        assert (folder / "state.json").exists()
        self.checkpoints.append(folder)

    def on_end(self, result: murmurate.Result) -> None:
        self.results.append(result)
