"""The measured costs of a device, kept in a JSON file, so that plans can be made for other machines."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from murmurate.errors import Refusal, cause_of
from murmurate.mapping.learning import Learning, digest
from murmurate.mapping.lines import Line
from murmurate.mapping.primitives import OF_MODEL, PRIMITIVES, shape_of
from murmurate.record.stored import UNSOUND, output
from murmurate.training.host import hardware, versions
from murmurate.training.run import Run
from murmurate.training.run_folder import plain

FORMAT = 1
NETWORK = "network"  # name of the link between hosts
_REMEDY = "Measure it there: murmurate plan RECIPE --profile --on FILE."


@dataclass
class RecipeCosts:
    """The measured costs of one recipe's loop on one device.

    lines: seconds of a call of each primitive while one process computes. busy: the factor by which each
    primitive is slower while all cores compute. deviation: standard deviation of an iteration's time,
    relative to that time. parameters: N. measured: the batches that were measured, as (simulators, rows).
    learning: how many env steps the recipe needs to a target, if that was measured. handover_seconds: how
    much longer a batch takes for each record (see ``records_of``) that an actor process passes to the
    learner; in profiles before 2026-11-29 for all records of a batch, which are one or two.
    shared_handover_seconds: the same where processes share cores, beyond what they compute; None if it was
    not measured. crowded: the factor by which all cores together compute less if two processes share each.
    background: share of the simulators' steps that native threads make. vectors: (number of parameters,
    updates per batch) of each of the learner's vectors, which are exchanged separately. vectors_within:
    (number of parameters, updates per call) of the vectors that make updates within a primitive, by its name.
    step_deviation: standard deviation of the time between a step of the strategy and the one before it,
    summed over the steps of a batch, relative to the iteration's time; None if it was not measured.
    """

    lines: dict[str, Line]
    busy: dict[str, float]
    deviation: float
    parameters: int
    measured: list[tuple[int, int]] = field(default_factory=list)
    learning: Learning | None = None
    handover_seconds: float = 0.0
    crowded: float = 1.0
    background: float = 0.0
    vectors: list[tuple[int, float]] = field(default_factory=list)
    vectors_within: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    shared_handover_seconds: float | None = None
    step_deviation: float | None = None


@dataclass
class Link:
    """latency_seconds: duration of an empty message. bytes_per_second: rate of long messages. how:
    ``measured`` or ``assumed``."""

    latency_seconds: float
    bytes_per_second: float
    how: str = "measured"

    def seconds(self, size: float) -> float:
        return self.latency_seconds + size / self.bytes_per_second


@dataclass
class DeviceProfile:
    """cores: number of cores of the host. device: that of the first run that was measured. date, hardware,
    versions: of the newest measurement. recipes: costs of recipes, by ``key``. exchange: seconds that a
    strategy adds to an update, as a line in the number of parameters, by ``exchange_key``. links: links by
    name. watts: power of a busy core, if that is known. left_out: variants (``variant_key``) that failed, or
    are not faster with several threads than with one: only another measurement of everything tries them
    again."""

    cores: int
    device: str = "cpu"
    date: str = ""
    hardware: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    recipes: dict[str, RecipeCosts] = field(default_factory=dict)
    exchange: dict[str, Line] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    watts: float | None = None
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def here(cls, cores: int, device: str) -> DeviceProfile:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(cores, device, now, hardware(), versions())

    @property
    def gpus(self) -> int:
        """Number of GPUs of the host."""
        return len(self.hardware.get("gpus", ()))

    def renew(self) -> None:
        """Set ``date``, ``hardware`` and ``versions`` to those of a measurement now."""
        now = DeviceProfile.here(self.cores, self.device)
        self.date, self.hardware, self.versions = now.date, now.hardware, now.versions

    def is_here(self, cores: int) -> bool:
        """Whether the profile is of this machine: of the same processor with as many cores."""
        return self.cores == cores and self.hardware.get("cpu") == hardware()["cpu"]


def key(run: Run) -> str:
    """Identifies what a recipe's costs depend on besides sizes: its world, its learner without
    ``_FREE_FIELDS``, its placement, its source's ``cost_settings``, and the source's class if that is not of
    this package."""
    learner = {name: value for name, value in plain(run.learner).items() if name not in _FREE_FIELDS}
    settings = {name: plain(value) for name, value in run.source.cost_settings().items()}
    # in this order, by which costs are found in profiles before 2026-12-01
    parts = [plain(run.world), learner, plain(run.placement), settings.pop("replay", None)]
    unnamed = ("augment", "rollouts")
    parts += [value if name in unnamed else [name, value] for name, value in settings.items()]
    own = type(run.source)
    if not own.__module__.startswith("murmurate."):
        parts.append(f"{own.__module__}.{own.__qualname__}")
    return f"{run.world.name} {run.learner.name} {digest(parts)}"


def variant_key(run: Run) -> str:
    """``key`` with the sizes of ``run``, on which it depends whether several threads pay."""
    shape = shape_of(run)
    return key(run) if shape is None else f"{key(run)} {shape.simulators}x{shape.rows}"


# fields of a learner that change no primitive's cost at a given size
_FREE_FIELDS = frozenset(
    {
        "batch",
        "learning_rate",
        "learning_rate_end",
        "explore_updates",
        "epsilon",
        "entropy_coefficient",
        "discount",
    }
)


def exchange_key(strategy: Any, replicas: int) -> str:
    """Identifies what an exchange depends on besides the number of parameters. The period is part of it: a
    step between two exchanges costs something too, which differs from strategy to strategy."""
    settings = json.dumps(plain(strategy), sort_keys=True, default=str)
    return f"{strategy.name} x{replicas} {settings}"


def save(profile: DeviceProfile, path: Path) -> None:
    stored = {"format": FORMAT, **dataclasses.asdict(profile)}
    with output(path) as fresh:  # a full disk or a signal must not cost what was measured before
        fresh.write_text(json.dumps(stored, indent=1) + "\n")


def load(path: Path) -> DeviceProfile:
    """Read a profile. Raises Refusal for a file that cannot be read or is no profile, and for unknown,
    missing or invalid parts."""
    try:
        stored = json.loads(path.read_text())
        if stored.pop("format") != FORMAT:
            raise ValueError("another format")
        recipes = {
            name: RecipeCosts(
                {primitive: _line(line) for primitive, line in costs["lines"].items()},
                {primitive: float(factor) for primitive, factor in costs["busy"].items()},
                float(costs["deviation"]),
                int(costs["parameters"]),
                [(int(n), int(rows)) for n, rows in costs["measured"]],
                None if costs["learning"] is None else Learning(**costs["learning"]),
                float(costs["handover_seconds"]),
                float(costs["crowded"]),
                float(costs.get("background", 0.0)),  # profiles before 2026-11-25 lack it
                # profiles before 2026-11-27 lack them
                _vectors(costs.get("vectors", ())),
                # nor do those before 2026-11-30 know models
                {primitive: _vectors(own) for primitive, own in costs.get("vectors_within", {}).items()},
                # profiles before 2026-12-01 lack both
                _optional(costs.get("shared_handover_seconds")),
                _optional(costs.get("step_deviation")),
            )
            for name, costs in stored.pop("recipes").items()
        }
        for costs in recipes.values():
            if costs.lines and not costs.lines.keys() & OF_MODEL:  # profiles before 2026-11-30 lack them
                costs.lines |= dict.fromkeys(OF_MODEL, Line(0.0, 0.0, (0.0, 0.0), (0.0, 0.0), (0, 0), 0.0))
                costs.busy |= dict.fromkeys(OF_MODEL, 1.0)
        if any(not set(costs.lines) <= set(PRIMITIVES) or not costs.lines for costs in recipes.values()):
            raise ValueError("other primitives")
        if any(set(costs.busy) != set(costs.lines) for costs in recipes.values()):
            raise ValueError("busy and lines have different primitives")
        exchange = {name: _line(line) for name, line in stored.pop("exchange").items()}
        links = {name: _link(link) for name, link in stored.pop("links").items()}
        profile = DeviceProfile(**stored, recipes=recipes, exchange=exchange, links=links)
        if type(profile.cores) is not int or profile.cores < 1:
            raise ValueError("cores must be a whole number above 0")
        if profile.watts is not None and not 0 < profile.watts < math.inf:
            raise ValueError("watts must be a number above 0")
        if not isinstance(profile.hardware, dict):
            raise ValueError("hardware must have names and values")
        int(profile.hardware.get("memory_bytes", 0))
        if not isinstance(profile.hardware.get("gpus", []), list):
            raise ValueError("gpus must be a list of names")
        if not all(isinstance(name, str) for name in profile.left_out):
            raise ValueError("left_out must be a list of names")
    except OSError as error:
        raise Refusal(f"{path}: {cause_of(error)}. {_REMEDY}") from error
    except UNSOUND as error:
        raise Refusal(
            f"{path} is no device profile ({type(error).__name__}: {error}). Remove it, and measure again: "
            "murmurate plan RECIPE --profile; or name another with --on."
        ) from error
    return profile


def _vectors(stored: Iterable[Any]) -> list[tuple[int, float]]:
    return [(int(size), float(updates)) for size, updates in stored]


def _line(stored: dict[str, Any]) -> Line:
    a, b = float(stored["a"]), float(stored["b"])
    if not (math.isfinite(a) and math.isfinite(b)):
        raise ValueError(f"a cost of {a} + {b} n seconds")
    low, high = ((float(stored[name][0]), float(stored[name][1])) for name in ("low", "high"))
    sizes = stored["sizes"]
    width = _optional(stored.get("width"))  # profiles before 2026-11-26 lack it
    return Line(a, b, low, high, (int(sizes[0]), int(sizes[1])), width)


def _optional(stored: Any) -> float | None:
    return None if stored is None else float(stored)


def _link(stored: dict[str, Any]) -> Link:
    """The link. Links are written by hand (docs/plan.md), perhaps with numbers in quotes. Raises ValueError
    for a negative or infinite latency, or a rate that is not above 0."""
    link = Link(**stored)
    latency, rate = float(link.latency_seconds), float(link.bytes_per_second)
    if not (0 <= latency < math.inf and rate > 0):
        raise ValueError("a link's latency_seconds must be at least 0, its bytes_per_second above 0")
    return Link(latency, rate, str(link.how))
