"""Which objects are callbacks, and which of them are called again after one has raised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from callbacks import Seen
from murmurate.record.callbacks import Callbacks, checked

RECORD = {"time_seconds": 1.0, "replica": 0}


@dataclass
class Counting:
    """Callbacks of one class are compared by their fields, some of which have no truth value."""

    weights: torch.Tensor = field(default_factory=lambda: torch.ones(2))
    fails: list[bool] = field(default_factory=list, compare=False)
    calls: int = field(default=0, compare=False)

    def on_record(self, record: Mapping[str, Any]) -> None:
        self.calls += 1
        if self.fails:
            raise KeyError("mine")


def test_callbacks_may_come_from_a_generator() -> None:
    seen = Seen()
    assert checked(callback for callback in [seen]) == (seen,)


def test_an_attribute_that_is_no_method_may_have_any_name() -> None:
    seen = Seen()
    seen.on_gpu = True  # type: ignore[attr-defined]
    assert checked([seen]) == (seen,)


def test_only_the_callback_that_raised_is_not_called_again() -> None:
    well, broken = Counting(), Counting(fails=[True])
    callbacks = Callbacks([well, broken])
    assert "Counting.on_record raised KeyError: 'mine'" in callbacks.records([RECORD])
    assert callbacks.records([RECORD]) == ""
    assert (well.calls, broken.calls) == (2, 1)
