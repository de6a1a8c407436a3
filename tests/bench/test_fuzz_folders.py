"""The bench that damages run folders: it does damage, and finds nothing."""

from __future__ import annotations

import random
import secrets
from pathlib import Path

import pytest

from murmurate.bench._damages import _damage_json, damage
from murmurate.bench._fuzz_folders import attack
from short_runs import content


def test_every_damage_changes_the_folder_or_says_that_it_did_not(run_folder: Path) -> None:
    changed = 0
    for seed in range(60):
        before = _names(run_folder)
        how, _ = damage(run_folder, random.Random(seed))
        assert how
        changed += _names(run_folder) != before
    assert changed > 30


def test_a_number_too_great_for_a_float_can_be_damaged_again(tmp_path: Path) -> None:
    for seed in range(100):
        (tmp_path / "run.json").write_text('{"a": 1' + 400 * "0" + "}")
        assert _damage_json(tmp_path, random.Random(seed))[0]


def _names(folder: Path) -> dict[str, object]:
    links = {str(path): path.lstat().st_mode for path in folder.rglob("*")}
    return {**links, **{name: hash(data) for name, data in content(folder).items()}}


@pytest.mark.slow
def test_no_damage_is_a_traceback_a_hang_or_a_silent_load() -> None:
    seed = secrets.randbits(32)
    outcomes = attack(120, seed)
    assert outcomes["attempts"] == 120
    fallen = {name: outcomes[name] for name in ("tracebacks", "hangs", "silent")}
    assert fallen == {"tracebacks": 0, "hangs": 0, "silent": 0}, f"seed {seed}"
    assert outcomes["refused"] > 10
    assert outcomes["accepted"] > 10
    assert outcomes["peak_bytes"] < 2**30
