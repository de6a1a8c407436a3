"""What benchmarks keep: made once, and not mixed with what another machine has made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from murmurate.bench import _cache
from murmurate.bench._cache import cached_run, cached_value, keyed
from murmurate.errors import RunFailed
from murmurate.training.run_folder import write_json


def test_a_value_is_computed_once_for_each_key(tmp_path: Path) -> None:
    counts = iter(range(9))
    found = [cached_value(tmp_path / "new", "row", [key], lambda: next(counts)) for key in (1, 2, 1)]
    assert found == [0, 1, 0]


@pytest.mark.parametrize(("part", "facts"), [("hardware", {"cpu": "other"}), ("versions", {"torch": "0.1"})])
def test_a_value_of_another_machine_is_refused(
    part: str, facts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_value(tmp_path, "row", 1, lambda: 5)
    monkeypatch.setattr(_cache, part, lambda: facts)
    with pytest.raises(RunFailed, match=rf"here are .*{next(iter(facts.values()))}.* --where"):
        cached_value(tmp_path, "row", 1, lambda: 6)


def test_a_run_of_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "summary.json").write_text('{"exit": "finished"}')
    stored = {"hardware": {"cpu": "other"}, "versions": {"torch": "0.1"}}
    monkeypatch.setattr(_cache, "open_run", lambda folder: SimpleNamespace(run=stored))
    with pytest.raises(RunFailed, match=r"is from other with torch 0\.1"):
        cached_run(tmp_path, "cartpole-dqn", (), print)


def test_a_value_of_an_earlier_version_is_taken(tmp_path: Path) -> None:
    write_json(tmp_path / f"{keyed('row', 1)}.json", {"value": 5})
    assert cached_value(tmp_path, "row", 1, lambda: 6) == 5
