"""Runs and values that benches keep: which of them count in a later result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from murmurate.bench import _cache
from murmurate.training.host import hardware, versions


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({}, 1),
        ({"hardware": {**hardware(), "memory_bytes": 1}}, 1),
        ({"hardware": {**hardware(), "cpu": "another"}}, 2),
        ({"versions": {**versions(), "torch": "1.0"}}, 2),
    ],
)
def test_a_finished_run_counts_on_the_machine_that_made_it(
    fields: dict[str, Any], made: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def run(words: Sequence[str]) -> None:
        folder = Path(words[words.index("--out") + 1])
        folder.mkdir()
        summary = {"exit": "finished", "env_steps_per_second": 1.0, "eval_return_mean": None}
        (folder / "summary.json").write_text(json.dumps(summary))
        here = {"hardware": hardware(), "versions": versions()}
        (folder / "run.json").write_text(json.dumps(here if folders else {**here, **fields}))
        folders.append(folder)

    monkeypatch.setattr(_cache, "run_murmurate", run)
    monkeypatch.setattr(_cache, "open_run", lambda folder: folder)
    for _ in range(3):
        _cache.cached_run(tmp_path / "run", "cartpole-a2c", (), lambda line: None)
    assert len(folders) == made
    assert len(list(tmp_path.glob("cut-off-run-*"))) == made - 1


def test_a_value_is_computed_once_on_a_machine_for_each_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter(range(9))

    def found(key: int) -> Any:
        return _cache.cached_value(tmp_path / "new", "row", [key], lambda: next(counts))

    assert [found(key) for key in (1, 2, 1)] == [0, 1, 0]
    monkeypatch.setattr(_cache, "hardware", lambda: {**hardware(), "cpu": "another"})
    assert [found(1), found(1)] == [2, 2]
    monkeypatch.setattr(_cache, "versions", lambda: {**versions(), "torch": "1.0"})
    assert found(1) == 3
