"""Which values the fields of ``metrics.jsonl``, ``run.json`` and ``summary.json`` may have.

Code that reads these files computes with the values, so a value of another kind, from another program or a
bad disk, is refused when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Kinds = Mapping[str, Callable[[Any], bool]]
MOST_REPLICAS = 10**6
_LARGEST = 1e300  # sums of smaller numbers are finite too


def is_sound(record: Any) -> bool:
    """Whether a record of ``metrics.jsonl`` has a time and a replica, and valid values."""
    return (
        isinstance(record, dict)
        and record.get("time_seconds") is not None
        and "replica" in record
        and first_unsound(record, _RECORD) is None
    )


def first_unsound(fields: Mapping[str, Any], kinds: Kinds) -> str | None:
    """The name of the first field whose value is neither None nor of the field's kind; None if all are sound.

    A field without a kind may have any value but a number that is not finite, or too large to compute with.
    """
    for name, value in fields.items():
        if value is None:
            continue
        if name in kinds:
            if not kinds[name](value):
                return name
        elif isinstance(value, (int, float)) and not is_number(value):
            return name
    return None


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number below 1e300."""
    return isinstance(value, (int, float)) and abs(value) < _LARGEST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return is_number(value) and 0 <= value < 2**63


def _is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1e12


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < MOST_REPLICAS


def _is_list_of(is_element: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_element, value))


def _is_episode(value: Any) -> bool:
    """An episode is [return or None, length]."""
    return isinstance(value, list) and len(value) == 2 and all(x is None or is_number(x) for x in value)


def _is_span(value: Any) -> bool:
    """A span is [kind, start, length]."""
    if not isinstance(value, list) or len(value) != 3:
        return False
    return _is_text(value[0]) and _is_time(value[1]) and _is_time(value[2])


def _is_histogram(value: Any) -> bool:
    """A histogram is {whole number as text: count}."""
    return isinstance(value, dict) and all(
        name.isascii() and name.isdigit() and len(name) < 19 and _is_count(count)
        for name, count in value.items()
    )


def _is_gossip_window(value: Any) -> bool:
    """A gossip window is {window, steps, cut}; ``docs/metrics.md`` describes these fields."""

    def maps_ranks_to_versions(versions: Any) -> bool:
        return isinstance(versions, dict) and all(
            rank.isascii()
            and rank.isdigit()
            and len(rank) < 8
            and _is_rank(int(rank))
            and _is_natural(version)
            for rank, version in versions.items()
        )

    if not isinstance(value, dict) or not _is_natural(value.get("window")):
        return False
    steps, cut = value.get("steps"), value.get("cut")
    if not isinstance(steps, list) or not steps or not isinstance(cut, dict):
        return False
    return (
        all(
            isinstance(step, list)
            and len(step) == 3
            and is_number(step[0])
            and _is_natural(step[1])
            and maps_ranks_to_versions(step[2])
            for step in steps
        )
        and _is_natural(cut.get("steps"))
        and maps_ranks_to_versions(cut.get("versions"))
        and is_number(cut.get("distance"))
    )


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


_CURVE_TEXTS = ("metric", "title", "label", "text")


def _is_curve(value: Any) -> bool:
    if not isinstance(value, dict) or not all(_is_text(value.get(name)) for name in _CURVE_TEXTS):
        return False
    return _is_text(value.get("spread") or "")  # runs of earlier versions lack it


_RECORD: Kinds = {
    "time_seconds": _is_time,
    "replica": _is_rank,
    "member": _is_rank,
    "env_steps": _is_count,
    "updates": _is_count,
    "joined_replicas": _is_count,
    "snapshot_seconds": _is_time,
    "kind": _is_text,
    "event": _is_text,
    "message": _is_text,
    "not_finite": _is_list_of(_is_text),
    "episode_returns": _is_list_of(_is_episode),
    "spans": _is_list_of(_is_span),
    "staleness_counts": _is_histogram,
    "gossip_window": _is_gossip_window,
    "returns": _is_list_of(lambda value: value is None or is_number(value)),
    "gradient_cosine": _is_list_of(lambda value: value is None or is_number(value)),
}
RUN: Kinds = {
    "recipe": _is_text,
    "strategy": lambda value: isinstance(value, (dict, str)),
    "replicas": lambda value: _is_rank(value) and value > 0,
    "unit": _is_text,
    "curves": _is_list_of(_is_curve),
    "headline": _is_curve,
    "command": lambda value: _is_text(value) or _is_list_of(_is_text)(value),
    "stop_at_return": is_number,
}
SUMMARY: Kinds = {
    **dict.fromkeys(("env_steps", "frames", "updates", "bytes_exchanged", "staleness_max"), _is_count),
    **dict.fromkeys(("wall_seconds", "virtual_seconds"), _is_time),
    **dict.fromkeys(
        (
            "env_steps_per_second",
            "train_return_mean",
            "eval_return_mean",
            "eval_return_stderr",
            "eval_success_rate",
            "best_eval_return_mean",
            "disagreement_final",
        ),
        is_number,
    ),
    "episodes": is_number,
    "dead_replicas": _is_list_of(_is_rank),
    "events": lambda value: isinstance(value, list),
    "exit": _is_text,
    "strategy": lambda value: isinstance(value, (dict, str)),
}
