"""Saved states of simulators that do not fit are refused, not broadcast into place."""

from __future__ import annotations

import pytest
import torch

from murmurate.worlds.registry import world

BROKEN = {
    "physics": [torch.zeros(0), torch.zeros(4, 1), torch.zeros(1)],
    "generators": [[]],
    "episodes": [{"episode_return": torch.zeros(1), "length": torch.zeros(3)}],
}


@pytest.mark.parametrize(
    ("name", "key"), [("cartpole", key) for key in BROKEN] + [("gym:Acrobot-v1", "physics")]
)
def test_another_shape_is_refused(name: str, key: str) -> None:
    simulators = world(name).open(3, training=True, first=0)  # type: ignore[attr-defined]
    simulators.reset(0)
    saved = simulators.state()
    for wrong in BROKEN[key] if name == "cartpole" else [[{"state": torch.zeros(0)}] * 3]:
        with pytest.raises(ValueError, match=r"shape|generators"):
            simulators.load(saved | {key: wrong})
    simulators.load(saved)
    simulators.send(torch.zeros(3, dtype=torch.int64))
    simulators.receive()
