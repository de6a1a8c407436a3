"""The fingerprint of a run's data set, in its run folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal
from murmurate.record.stored import UNSOUND, read_object, write_json
from murmurate.spec import World

_FILE = "source.json"


def record_data(folder: Path, world: World) -> None:
    """Write the fingerprint, once, before a learner starts. Raises Refusal for a data set that cannot be
    read."""
    if not (folder / _FILE).exists() and (fingerprint := world.fingerprint()) is not None:
        write_json(folder / _FILE, fingerprint)


def read_fingerprint(folder: Path) -> dict[str, Any] | None:
    """The fingerprint of a run folder's data set; None if it has none (the run learns in simulators, or the
    file was deleted). Raises Refusal if the file cannot be read."""
    path = folder / _FILE
    try:
        return read_object(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Refusal(
            f"{path} cannot be read ({error}). Delete it, if the data set is as it was when the run began."
        ) from error


def check_data(folder: Path, world: World, *, thorough: bool = True) -> None:
    """Raise Refusal if ``world`` is not the data set that the run in ``folder`` began with.

    thorough: see ``World.check_fingerprint``.
    """
    fingerprint = read_fingerprint(folder)
    if fingerprint is None:
        return
    try:
        world.check_fingerprint(fingerprint, thorough)
    except UNSOUND as error:
        raise Refusal(
            f"{folder / _FILE} cannot be read ({error!r}). Delete it, if the data set is as it was when the "
            "run began."
        ) from error


def refuse_missing(world: World) -> None:
    """Raise Refusal if a file that the run began with is no longer where it was."""
    for name, place in places(world):
        if isinstance(place, str) and place and name != "cache" and not _exists(place):
            option = name.replace("_", "-")
            raise Refusal(
                f"There is no {place}, which the run began with. Give its present path: murmurate "
                f"resume DIR --world.{option} NEW (eval has this option too)."
            )


def _exists(place: str) -> bool:
    """Whether a path exists; for a pattern such as ``shards/{000..146}.tar``, whether its folder does."""
    beginning, brace, _ = place.partition("{")
    return os.path.exists(os.path.dirname(beginning) or ".") if brace else os.path.exists(place)


def places(config: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of each field of a frozen config that is marked ``place``: paths, caches and settings of
    processes, which do not change what is learned."""
    for field in dataclasses.fields(config):
        if field.metadata.get("place"):
            yield field.name, getattr(config, field.name)


def place_names(config: Any, prefix: str = "") -> Iterator[str]:
    """The names of all ``place`` fields, those of nested configs with dots."""
    for field in dataclasses.fields(config):
        if field.metadata.get("place"):
            yield prefix + field.name
        elif field.init and dataclasses.is_dataclass(value := getattr(config, field.name)):
            yield from place_names(value, f"{prefix}{field.name}.")


def without_places(config: Any) -> Any:
    """The config with all ``place`` fields, nested ones too, at their defaults."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.metadata.get("place"):
            changes[field.name] = field.default
        elif field.init and dataclasses.is_dataclass(value := getattr(config, field.name)):
            changes[field.name] = without_places(value)
    return dataclasses.replace(config, **changes)
