"""Batches that a learner's own model of the world imagines, with a share of real transitions.

Model-based policy optimisation (Janner et al. 2019, Algorithm 2) and maximum-entropy model rollouts (Zhang
2022, Algorithm 2). This source holds the replays of real and of imagined transitions, and decides when the
model is fitted and rolled out; the learner decides how (``agents.interface.ModelAgent``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Annotated, Any, ClassVar, cast

from murmurate.agents.interface import ModelAgent
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeInt, PositiveInt, Range, RepeatCount, UnitInterval
from murmurate.replay.config import ReplayConfig, replay_bytes
from murmurate.sources.imagined_sampler import WEIGHT, ImaginedSampler
from murmurate.sources.interface import BatchShape, RunView, Source, SourceConfig, SourceContext
from murmurate.sources.replay_source import ReplaySource
from murmurate.sources.simulator_groups import (
    SIMULATOR_BYTES,
    check_saved_simulators,
    check_simulators,
    open_groups,
    step_bytes,
)
from murmurate.spec import derive_seed
from murmurate.worlds.interface import SimulatorWorld

_LENGTH_POINTS = 200  # env steps at which the length of rollouts is looked at, for its mean


@dataclass(frozen=True)
class ModelRollouts:
    """When, from where and how far the model is rolled out; the defaults are those of MBPO.

    every: env steps between two rounds of rollouts. starts: number of real states, drawn with replacement,
        from which the rollouts of a round begin.
    length: steps of a rollout at first; a rollout ends earlier where the model predicts the end of the
        episode. The length grows linearly, rounded down, to ``length_end`` between ``grows_after`` and
        ``grows_until`` env steps after the first fit of the model. length_end: steps of a rollout in the end.
    grows_after, grows_until: env steps after the first fit at which the length begins and ceases to grow.
    kept: number of rounds whose imagined transitions are kept.
    alpha: for learners that give states priorities: the states from which a round begins are drawn in
        proportion to priority ** alpha (Zhang 2022, eq. 3.6), and the imagined part of a batch, with its
        weights, comes from a single round (section 3.2.3). With other learners alpha must be 0, and these
        states are drawn uniformly.
    beta, beta_end: exponent of the importance weights of these states, and its final value, reached linearly
        over the run.
    """

    every: PositiveInt = 250
    starts: PositiveInt = 100_000
    length: RepeatCount = 1
    length_end: RepeatCount = 1
    grows_after: NonNegativeInt = 20_000
    grows_until: PositiveInt = 150_000
    kept: PositiveInt = 4
    alpha: UnitInterval = 0.0
    beta: UnitInterval = 0.4
    beta_end: UnitInterval = 1.0

    def length_after(self, env_steps: float) -> int:
        """Steps of a rollout, so many env steps after the first fit."""
        share = (env_steps - self.grows_after) / (self.grows_until - self.grows_after)
        return int(self.length + min(max(share, 0.0), 1.0) * (self.length_end - self.length))

    def capacity(self, length: int) -> int:
        """Number of imagined transitions that are kept if rollouts have ``length`` steps."""
        return self.kept * self.starts * length


@dataclass(frozen=True)
class ImaginedSourceConfig(SourceConfig):
    """Batches of imagined and real transitions, for a learner with a model.

    simulators: number of simulators of each learner. double_buffer: act for one half of the simulators while
        the other half steps in native threads or another process; useless where the learner waits
        while they step, as for gymnasium's unless ``served``.
    capacity: number of real transitions that are kept; the oldest are overwritten.
    learning_starts: env steps of each learner, with uniformly random actions, before the first fit.
    updates_per_step: number of batches for each env step after ``learning_starts``.
    fit_every: env steps between two fits of the model.
    real_share: share of real transitions in a batch.
    """

    simulators: PositiveInt = 1
    double_buffer: bool = False
    capacity: PositiveInt = 1_000_000
    learning_starts: PositiveInt = 5_000
    updates_per_step: Annotated[float, Range(1e-3, 1e3)] = 20.0
    fit_every: PositiveInt = 250
    real_share: UnitInterval = 0.05
    rollouts: ModelRollouts = field(default_factory=ModelRollouts)

    gives: ClassVar[str] = "model"

    def check(self, run: RunView) -> None:
        check_simulators(self.simulators, self.double_buffer)
        requires, rollouts = run.learner.requires, self.rollouts
        if self.capacity < requires.batch:
            raise Refusal(
                f"capacity is {self.capacity} and a batch is {requires.batch}: no batch could be drawn. Use "
                f"--capacity {100 * requires.batch}."
            )
        if max(requires.batch, self.learning_starts) < 2:
            raise Refusal(
                "the model is fitted to one transition and tested on another. Use --learning-starts 2."
            )
        imagined = requires.batch - int(requires.batch * self.real_share)
        if rollouts.starts < imagined:
            raise Refusal(
                f"a round of rollouts may give only {rollouts.starts} transitions, and a batch has "
                f"{imagined} of them. Use --rollouts.starts {imagined}, or more."
            )
        if rollouts.grows_until <= rollouts.grows_after:
            raise Refusal(
                f"rollouts.grows_until is {rollouts.grows_until}, not after rollouts.grows_after. Use "
                f"--rollouts.grows-until {rollouts.grows_after + 1}."
            )
        if rollouts.alpha and not requires.priorities:
            raise Refusal(
                f"rollouts.alpha is {rollouts.alpha}, and {run.learner.name} gives states no priorities. Use "
                "--rollouts.alpha 0, or a memr recipe."
            )
        if requires.priorities and max(rollouts.length, rollouts.length_end) > 1:
            raise Refusal(
                f"rollouts of more than one step visit imagined states, to which {run.learner.name} gives no "
                "priorities. Use --rollouts.length 1 --rollouts.length-end 1, or an mbpo recipe."
            )
        if run.env_steps is None:
            return
        env_steps = run.env_steps // run.replicas
        if env_steps <= self.learning_starts:
            raise Refusal(
                f"each learner makes {env_steps:,} env steps and begins to learn after "
                f"{self.learning_starts:,}. Use more --env-steps, or --learning-starts {env_steps // 2}."
            )
        if env_steps < requires.batch:
            raise Refusal(
                f"each learner makes {env_steps:,} env steps, and it learns only once it has the "
                f"{requires.batch:,} transitions of a batch. Use more --env-steps, or --agent.policy.batch "
                f"{max(1, env_steps // 2)}."
            )
        if (env_steps - self.learning_starts) * self.updates_per_step < 1:
            raise Refusal(
                f"{env_steps:,} env steps of a learner do not suffice for an update: after "
                f"{self.learning_starts:,} each allows {self.updates_per_step:g}. Use more --env-steps, or a "
                "greater --updates-per-step."
            )

    def batch_shape(self, run: RunView) -> BatchShape | None:
        """None for an agent that does not tell how long its fits are."""
        if not hasattr(run.learner, "fit_steps"):
            return None
        return BatchShape(
            self.simulators,
            1 + self.double_buffer,
            1 / (self.updates_per_step * self.simulators),
            run.learner.requires.batch,
            fit_steps=run.learner.fit_steps(self.mean_transitions(run)) / self.fit_batches,
            rollout_steps=self.mean_length(run) / self.rollout_batches,
        )

    def cost_settings(self) -> dict[str, Any]:
        return {"rollouts": [self.rollouts.starts, self.real_share, self.rollouts.alpha > 0]}

    def batches(self, run: RunView) -> int | None:
        if run.env_steps is None:
            return None
        return max(1, int((run.env_steps / run.replicas - self.learning_starts) * self.updates_per_step))

    def batches_at_once(self, run: RunView) -> int:
        return max(1, int(self.simulators * self.updates_per_step))

    def memory_bytes(self, run: RunView) -> int:
        batches = 2 * run.learner.requires.batch * step_bytes(run)
        # copies of two rounds of rollouts; where their length changes, the replay of all kept rounds is
        # resized, which copies it
        rollouts = self.rollouts
        rounds = 2 * (rollouts.kept if rollouts.length_end != rollouts.length else 1)
        copies = rounds * rollouts.starts * max(rollouts.length, rollouts.length_end) * step_bytes(run)
        return int(self.saved_bytes(run) + batches + copies + self.simulators * SIMULATOR_BYTES)

    def saved_bytes(self, run: RunView) -> int:
        requires, rollouts = run.learner.requires, self.rollouts
        longest = max(rollouts.length, rollouts.length_end)
        weight = {WEIGHT: ()} if requires.priorities else {}  # of imagined transitions
        return sum(
            replay_bytes(
                ReplayConfig(capacity=capacity),
                run.world.spec(),
                simulators=self.simulators,
                steps=1,
                batch=requires.batch,
                behaviour=behaviour,
            )
            for capacity, behaviour in ((self.capacity, {}), (rollouts.capacity(longest), weight))
        )

    def check_state(self, state: dict[str, Any]) -> None:
        check_saved_simulators(state, self.simulators)

    # -- how often the model is fitted and rolled out ------------------------------------------------------

    @property
    def fit_batches(self) -> int:
        """Number of batches between two fits."""
        return max(1, round(self.fit_every * self.updates_per_step))

    @property
    def rollout_batches(self) -> int:
        """Number of batches between two rounds of rollouts."""
        return max(1, round(self.rollouts.every * self.updates_per_step))

    def mean_transitions(self, run: RunView) -> float:
        """Number of real transitions that a learner has at a fit, the mean over the run; at the first fit, if
        the run's env steps are not planned."""
        first = max(self.learning_starts, int(run.learner.requires.batch))
        last = 0.0 if run.env_steps is None else run.env_steps / run.replicas
        if last <= first:
            return float(min(first, self.capacity))
        least, most = min(first, self.capacity), min(last, self.capacity)
        growing = (most - least) * (most + least) / 2
        return (growing + (last - first - (most - least)) * self.capacity) / (last - first)

    def mean_length(self, run: RunView) -> float:
        """Steps of a rollout, the mean over the run; at first, if the run's env steps are not planned."""
        rollouts = self.rollouts
        if run.env_steps is None:
            return float(rollouts.length)
        env_steps = max(0.0, run.env_steps / run.replicas - self.learning_starts)
        points = range(_LENGTH_POINTS)
        return fmean(rollouts.length_after((k + 0.5) * env_steps / _LENGTH_POINTS) for k in points)

    def with_short_rounds(self, batches: int, transitions: int) -> ImaginedSourceConfig:
        """This config for a measurement: it fits the model for the first time to no more than ``transitions``
        transitions, and then again after ``batches`` batches; its rollouts, of one step, are as frequent."""
        per_step = min(self.updates_per_step, batches / 2)
        every = max(1, round(batches / per_step))
        return replace(
            self,
            learning_starts=min(self.learning_starts, transitions),
            updates_per_step=per_step,
            fit_every=every,
            rollouts=replace(self.rollouts, every=every, length=1, length_end=1, kept=1),
        )

    def open(self, context: SourceContext) -> Source:
        run, learner, rank = context.run, cast(ModelAgent, context.learner), context.rank
        seed, world = derive_seed(run.seed, "source", rank), cast(SimulatorWorld, run.world)
        sampler = ImaginedSampler(
            self,
            run.learner.requires,
            world.spec(),
            learner,
            seed=derive_seed(run.seed, "replay", rank),
            device=context.device,
            progress=context.progress,
        )
        first, total = rank * self.simulators, run.replicas * self.simulators
        source = ReplaySource(
            open_groups(world, self.simulators, training=True, double_buffer=self.double_buffer),
            learner,
            sampler,
            seed=seed,
            assign=lambda index: learner.assign_simulators(first + index, total),
            random_env_steps=self.learning_starts,
        )
        sampler.alive = lambda played: source.alive(played)  # the training loop sets ``source.alive`` later
        return source
