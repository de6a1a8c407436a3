"""Hostile byte streams at a live fabric: nothing is believed, nothing falls, and what goes wrong is seen."""

from __future__ import annotations

from typing import Any

import pytest

from murmurate.bench import _fuzz_network
from murmurate.bench._fuzz_network import attack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_live_fabric_stands_hostile_streams() -> None:
    outcomes = attack(150, seed=21)
    bad = {name: outcomes[name] for name in ("accepted", "tracebacks", "hangs", "silent")}
    assert not any(bad.values()), bad
    assert outcomes["refused"] > 50, "the attacker was heard"
    assert outcomes["exchanges"] > 10
    assert outcomes["peak_bytes"] < 2**30


def test_a_member_that_believes_everything_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that were changed on their way are taken: their values are counted, or end in an error."""
    gullible = (
        "from murmurate.fabric.network import crypto; "
        "crypto.AeadStream.encrypt = property(lambda self: False, lambda self, value: None); "
        "crypto.AeadStream.check = lambda self, piece, tag: self._nonce(); "
    )
    popen = _fuzz_network.subprocess.Popen

    def start(words: list[str], **options: Any) -> Any:
        return popen([*words[:-1], gullible + words[-1]], **options)

    monkeypatch.setattr(_fuzz_network.subprocess, "Popen", start)
    monkeypatch.setattr(_fuzz_network, "_PROGRESS_SECONDS", 10.0)
    monkeypatch.setattr(_fuzz_network._Attacker, "attempt", lambda self: self._damage_traffic())
    outcomes = attack(500, seed=5)
    assert outcomes["silent"] + outcomes["tracebacks"] + outcomes["hangs"] > 0


def test_memory_that_the_last_attack_takes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(self: Any) -> bool:
        self.grown_bytes = 7
        return False

    for name in ("_open_connection", "_damage_traffic", "_damage_the_store", "_send_stream"):
        monkeypatch.setattr(_fuzz_network._Attacker, name, grow)
    monkeypatch.setattr(
        _fuzz_network._Attacker, "_resident_bytes", lambda self: 5 + getattr(self, "grown_bytes", 0)
    )
    assert attack(1, seed=1)["peak_bytes"] == 7
