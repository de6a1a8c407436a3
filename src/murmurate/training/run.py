"""``Run``: the one value that describes a run. It opens nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch

from murmurate.errors import Refusal
from murmurate.evaluation.interface import Evaluation
from murmurate.ranges import AnyFloat, NonNegativeInt, PositiveInt, PositiveSeconds, Range, Seed, check_ranges
from murmurate.record.loggers import check_loggers
from murmurate.replicator.learner import LearnerConfig
from murmurate.replicator.replica_parts import check_parts
from murmurate.sources.interface import SourceConfig
from murmurate.spatial.parts import checked_grid
from murmurate.spec import Placement, World
from murmurate.strategies.interface import Strategy

_SLOW_DISK_BYTES_PER_SECOND = 50e6


@dataclass(frozen=True)
class Run:
    """The complete configuration of a run. A recipe is a function that returns one.

    The fields of ``source`` and ``evaluation`` are options without a prefix (``flat``), those of ``learner``
    begin with ``agent``; they have the same names in ``run.json``. Fields marked ``movable``, and those
    marked ``place`` in any nested config, may change on resume.

    recipe: the recipe's name. world: simulators or a data set. learner: model, losses and optimizers.
    strategy: how the replicas agree.
    source: provides the batches. evaluation: how the learner is evaluated at the end of the run, and by
        ``murmurate eval``.
    replicas: number of learners that train together.
    parts: number of processes of each replica along the rows, and along the columns, of its images; each
        computes a rectangle (``murmurate.spatial``). For learners of images with one optimizer.
    env_steps: total env steps of the replicas at which the run ends (examples, if it learns from examples).
    updates: number of updates of each replica, after which the run ends. minutes: minutes of wall time, after
        which it ends. Of these three the first one reached ends the run; at least one is given.
    stop_at_return: also end once the mean return of the last 100 training episodes reaches this.
    initial: folder of a run, or of one of its checkpoints (``RUN/checkpoints/best``, say), whose parameters
        this run starts from, with the buffers of their modules (running statistics, for example); optimizers
        start anew. Its replicas have the same names and shapes as this run's. None: parameters are drawn.
    initial_except: with ``initial``, names of parameters and buffers that are drawn all the same, or their
        beginnings up to a dot: ``head`` for a classifier's last layer, if the classes are others.
    seed: everything random derives from it.
    launcher: ``local`` (processes of this host), ``inline`` (one thread at a time, on a simulated fabric),
        ``torchrun`` or ``ray``.
    placement: devices of the replicas, and threads of each process.
    checkpoint_every_env_steps: total env steps of the replicas between two checkpoints.
    checkpoint_every_seconds: seconds of wall time after which the next checkpoint is made at the latest;
        none: only env steps count. The time is longer if saving would otherwise take more than a twentieth of
        it, as with a large replay. Without effect under ``inline``.
    evaluate_every_env_steps: total env steps of the replicas between two evaluations while the run learns; 0:
        only at its end. The consensus parameters at that moment are evaluated in a separate process (launcher
        ``inline``: between two steps). An evaluation that comes due during another begins after it.
        Evaluations by games then also choose the best checkpoint, in place of the training returns.
    probe_every_updates: updates of a replica between two measurements of disagreement and gradient cosines;
        0: none.
    record_every_seconds: seconds between two lines of a replica in ``metrics.jsonl``.
    restarts: how often each replica that died is started again, with a living peer's state (launcher
        ``local``). With 0 the run goes on without it: what killed it, for example too little memory, may kill
        it again.
    hang_after_seconds: a replica without a sign of life for so long, as when its environment hangs, is ended
        and started again with a living peer's state (launcher ``local``), at most three times; the run fails
        if there is no such peer. Raise it for environments whose single step or reset takes longer: what it
        is above 120 is added to the deadline of synchronous strategies, which depends on the time of rounds.
    compression: compression of vectors sent between hosts (launchers ``torchrun`` and ``ray``) by register
        and mail: ``bfloat16`` or ``int8``, in mail with error feedback. Refused under a strategy that uses
        neither; where all members turn out to share one host's memory it has no effect, and an event says so.
    loggers: loggers beside TensorBoard: ``wandb`` (Weights & Biases), ``mlflow`` (MLflow).
    """

    recipe: str
    world: World
    learner: LearnerConfig = field(metadata={"option": "agent"})
    strategy: Strategy
    source: SourceConfig = field(metadata={"flat": True})
    evaluation: Evaluation = field(metadata={"flat": True, "movable": True})
    replicas: Annotated[int, Range(1, 1_000_000)] = 1
    parts: tuple[PositiveInt, ...] = field(default=(1,), metadata={"movable": True, "since": 4})
    env_steps: PositiveInt | None = field(default=None, metadata={"movable": True})
    updates: PositiveInt | None = field(default=None, metadata={"movable": True})
    minutes: Annotated[float, Range(0, 1e8, exclude_least=True)] | None = field(
        default=None, metadata={"movable": True}
    )
    stop_at_return: AnyFloat | None = field(default=None, metadata={"movable": True})
    initial: str | None = field(default=None, metadata={"since": 7})
    initial_except: tuple[str, ...] = field(default=(), metadata={"since": 8})
    seed: Seed = 0
    launcher: str = field(default="local", metadata={"movable": True})
    placement: Placement = field(default_factory=Placement, metadata={"movable": True})
    checkpoint_every_env_steps: PositiveInt = field(default=250_000, metadata={"movable": True})
    checkpoint_every_seconds: PositiveSeconds | None = field(
        default=60.0, metadata={"movable": True, "since": 6}
    )
    evaluate_every_env_steps: NonNegativeInt = field(default=0, metadata={"movable": True, "since": 6})
    probe_every_updates: NonNegativeInt = field(default=200, metadata={"movable": True})
    record_every_seconds: PositiveSeconds = field(default=1.0, metadata={"movable": True})
    restarts: Annotated[int, Range(0, 2_000)] = field(default=0, metadata={"movable": True})
    hang_after_seconds: Annotated[float, Range(5, 1e6)] = field(
        default=120.0, metadata={"movable": True, "since": 2}
    )
    compression: Literal["none", "bfloat16", "int8"] = field(default="none", metadata={"movable": True})
    loggers: tuple[Literal["wandb", "mlflow"], ...] = field(
        default=(), metadata={"movable": True, "since": 6}
    )

    def validate(self) -> None:
        """Raise Refusal for a number outside its range (``ranges``), and for contradictory fields."""
        check_ranges(self)
        if self.env_steps is None and self.updates is None and self.minutes is None:
            raise Refusal("the run has no end: give --env-steps, --updates or --minutes.")
        if not self.placement.devices:
            raise Refusal("a placement names at least one device. Use --placement.devices cpu.")
        if self.initial_except and self.initial is None:
            raise Refusal(
                "--initial-except names what a run does not take over from another: give that run's folder "
                "with --initial, or leave both out."
            )
        self.strategy.check(self.replicas)
        requires = self.learner.requires
        if self.world.unit != requires.unit:
            raise Refusal(
                f"{self.learner.name} learns from {requires.unit}, and the world '{self.world.name}' has "
                f"{self.world.unit}. Use a recipe of that world: murmurate list recipes."
            )
        if self.source.gives != requires.kind:
            raise Refusal(
                f"{self.learner.name} learns from {requires.kind}, and the run's source gives "
                f"{self.source.gives}."
            )
        self.source.check(self)
        self.evaluation.check()
        check_loggers(self.loggers)
        self._check_parts()

    def _check_parts(self) -> None:
        parts = math.prod(self.grid)
        check_parts(self.strategy, parts)
        if parts > 1 and (self.learner.requires.kind, self.unit) != ("examples", "images"):
            raise Refusal(
                f"{self.learner.name} learns from {self.learner.requires.kind} of {self.unit}, and only "
                "images are divided among parts: leave out --parts."
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Number of parts of a replica along the rows and along the columns of its images."""
        return checked_grid((*self.parts, 1) if len(self.parts) == 1 else self.parts)

    @property
    def title(self) -> str:
        """Recipe, strategy and number of replicas. One that is alone has nobody to exchange anything with."""
        strategy = f" · {self.strategy.name}" * (self.members > 1)
        return f"{self.recipe}{strategy} · {self.replicas} replica{'s' * (self.replicas > 1)}"

    @property
    def members(self) -> int:
        """Number of replicas, plus one if the strategy has a centre, which is then the last member."""
        return self.replicas + self.strategy.centre

    @property
    def unit(self) -> str:
        """What ``env_steps`` counts."""
        return self.world.unit

    @property
    def return_reached(self) -> str:
        """Why a run stops at ``stop_at_return``, as its summary says; a resume knows the end by it."""
        return f"the mean return of the last 100 training episodes reached {self.stop_at_return:g}"

    def planned_updates(self) -> int | None:
        """Updates per replica over the whole run, for schedules; None if only time ends the run."""
        batches = self.source.batches(self)
        ends = [self.updates, None if batches is None else self.learner.updates(batches)]
        return min((end for end in ends if end is not None), default=None)

    def device(self, rank: int) -> torch.device:
        """The device of ``rank``: for a replica, that of the placement; for a centre the CPU, where messages
        arrive."""
        return self.placement.device(rank) if rank < self.replicas else torch.device("cpu")

    def more_seconds(self) -> float:
        """By how much this run allows its steps more time than usual; deadlines of other waits grow by it."""
        return max(0.0, self.hang_after_seconds - Run.hang_after_seconds)

    def saving_seconds(self) -> float:
        """Extra time for writing all sources' state to a slow disk."""
        return self.replicas * self.source.saved_bytes(self) / _SLOW_DISK_BYTES_PER_SECOND
