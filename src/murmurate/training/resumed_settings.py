"""What a resume may change of a run's settings, and whether the run has reached its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, quoted
from murmurate.training import checkpoint
from murmurate.training.data_record import without_places
from murmurate.training.run import Run
from murmurate.training.run_folder import plain


def refuse_changes(run: Run, stored: Run, folder: Path) -> None:
    """Raise Refusal if ``run``, which goes on with ``stored``, differs in other fields than movable ones and
    places."""
    stored_movable = {
        f.name: getattr(stored, f.name) for f in dataclasses.fields(run) if f.metadata.get("movable")
    }
    unmoved = dataclasses.replace(run, **stored_movable)
    if changed := _changed_options(plain(without_places(unmoved)), plain(without_places(stored))):
        raise Refusal(
            f"{' and '.join(changed)} cannot change on resume: what was learned so far depends on it. "
            f"Train anew: murmurate train, with --out; --initial {quoted(folder)} begins with what it has "
            "learned."
        )


def _changed_options(new: dict[str, Any], stored: dict[str, Any], prefix: str = "--") -> list[str]:
    """The options of the fields in which ``new`` differs from ``stored``, both as from ``plain``; that of the
    whole part where it is of another class."""
    options = []
    for name, value in new.items():
        option, old = f"{prefix}{name.replace('_', '-')}", stored.get(name)
        if isinstance(value, dict) and isinstance(old, dict) and value.keys() == old.keys():
            options += _changed_options(value, old, f"{option}.")
        elif value != old:
            options.append(option)
    return options


def refuse_past_ends(run: Run, stored: Run, folder: Path, newest: Path) -> None:
    """Raise Refusal if ``run`` is to end earlier than ``stored``, before its checkpoint ``newest``; or if it
    has reached an end, and another one is moved: nothing would be learned."""
    made = _made(run, newest)
    for name, number in made.items():
        goal, stored_goal = getattr(run, name), getattr(stored, name)
        # a goal that is raised may still be passed already, by the rest of the last batch
        is_lowered = goal is not None and (stored_goal is None or goal < stored_goal)
        if is_lowered and goal <= number:
            unit = run.unit if name == "env_steps" else name
            raise Refusal(f"{folder} is already at {round(number, 3):,} {unit}; give more than that.")
    moved: dict[str, Any] = {name: None for name in made if getattr(run, name) != getattr(stored, name)}
    if moved and (end := reached_end(dataclasses.replace(run, **moved), newest)):
        raise Refusal(f"{folder} would learn nothing more: {end}, too.")


def reached_end(run: Run, newest: Path) -> str:
    """The end that ``run`` has reached at its checkpoint ``newest``, and how to go on; empty if none."""
    for name, number in _made(run, newest).items():
        goal = getattr(run, name)
        if goal is not None and number >= goal:
            unit = run.unit if name == "env_steps" else name
            option = name.replace("_", "-")
            more = f"To go on, give more with --{option} (in Python: {name})"
            return f"it has reached its end of {goal:,} {unit}. {more}"
    return ""


def reached_return(run: Run, summary: Mapping[str, Any]) -> str:
    """As ``reached_end``, of the return at which ``run`` ends. summary: of its end."""
    if run.stop_at_return is None or summary.get("stopped_because") != run.return_reached:
        return ""
    return f"{run.return_reached}. To go on, give more with --stop-at-return (in Python: stop_at_return)"


def _made(run: Run, newest: Path) -> dict[str, float]:
    """What a run has made up to the checkpoint ``newest``, by the name of the field that limits it."""
    manifest = checkpoint.read_manifest(newest)
    updates = [checkpoint.updates(newest, rank) for rank in checkpoint.parts(newest) if rank < run.replicas]
    steps, minutes = int(manifest["env_steps"]), float(manifest["seconds"]) / 60
    return {"env_steps": steps, "updates": min(updates), "minutes": minutes}
