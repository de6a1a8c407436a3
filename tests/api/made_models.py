"""The type of the fixture that trains and loads models."""

from __future__ import annotations

from collections.abc import Callable

import murmurate

MakeModel = Callable[..., murmurate.TrainedModel]
