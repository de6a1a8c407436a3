"""The replays of real and of imagined transitions, and when the model is fitted and rolled out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from murmurate.agents.interface import ModelAgent, PrioritizingAgent
from murmurate.replay.interface import Sample, Steps
from murmurate.replay.priorities import Prioritized, SlotSampler, Uniform
from murmurate.replay.row_replay import RowReplay
from murmurate.replay.rows import RECORDED, Column
from murmurate.replay.segments import Segmented
from murmurate.sources.replay_sampler import on_device
from murmurate.spec import Batch, EnvSpec, Episode, Model, derive_seed

if TYPE_CHECKING:
    from murmurate.sources.imagined import ImaginedSourceConfig

WEIGHT = "weight"  # column of the importance weights of the states from which rollouts began
# columns that the model is fitted to, and that it imagines
_MODELLED = ("observation", "action", "reward", "next_observation")


class ImaginedSampler:
    """A ``Sampler``: before a batch is drawn, the model is fitted and rolled out if that is due.

    Both are due after certain numbers of batches, not of env steps, so that replicas that wait for one
    another do them at the same time. alive: called while the model is fitted, with the env steps since the
    last batch; True requests a stop.

    Attributes:
        replay: the real transitions. model_replay: the imagined transitions. imagined: number of transitions
            imagined so far.
    """

    banks = None

    def __init__(
        self,
        config: ImaginedSourceConfig,
        requires: Model,
        spec: EnvSpec,
        learner: ModelAgent,
        *,
        seed: int,
        device: torch.device,
        progress: Callable[[], float],
    ) -> None:
        self.config, self.rollouts, self.requires = config, config.rollouts, requires
        self.device, self.exact = device, True
        self.alive: Callable[[int], bool] = lambda played: False
        # ``batches`` counts from the start of the run, ``_drawn_batches`` since the replays were empty
        self.batches = self.played = self.imagined = self._drawn_batches = 0
        self._spec, self._learner, self._seed, self._progress = spec, learner, seed, progress
        self._sampler = self._new_sampler(config.capacity, seed)
        self.replay = self._new_replay(self._sampler, config.simulators)
        self._length = self.rollouts.length
        self.model_replay = self._new_model_replay()

    def _new_sampler(self, slots: int, seed: int) -> Prioritized | Uniform:
        if self.requires.priorities:
            return Prioritized(slots, alpha=self.rollouts.alpha, seed=seed)
        return Uniform(slots, seed=seed)

    def _new_replay(self, sampler: SlotSampler, simulators: int = 1, weighted: bool = False) -> RowReplay:
        return RowReplay(
            sampler,
            Column(self._spec.observation_shape, self._spec.observation_dtype),
            Column(self._spec.action_shape, torch.float32),
            discount=self.requires.discount,
            simulators=simulators,
            behaviour={WEIGHT: ()} if weighted else None,
        )

    def _new_model_replay(self) -> RowReplay:
        """A replay for rollouts of the current length. If states have priorities, each round is a segment."""
        seed, starts = derive_seed(self._seed, "imagined"), self.rollouts.starts
        if not self.requires.priorities:
            return self._new_replay(Uniform(self.rollouts.capacity(self._length), seed=seed))
        seeds = [derive_seed(seed, "segment", k) for k in range(self.rollouts.kept)]
        segments = [Uniform(starts, seed=each) for each in seeds]
        return self._new_replay(Segmented(segments, whole=True, seed=seed), weighted=True)

    # -- env steps ---------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether a batch is to be drawn before further env steps."""
        allowed = self.config.updates_per_step * (self.played - self.config.learning_starts)
        return self._drawn_batches + 1 <= allowed and len(self.replay) >= self.requires.batch

    def before_steps(self) -> None:
        """Do nothing: no batch is drawn in advance."""

    def insert(self, first_simulator: int, steps: Steps) -> None:
        count = self.replay.observe(first_simulator, steps)
        self.played += count
        if self.requires.priorities:
            learner = cast(PrioritizingAgent, self._learner)
            priority = learner.priority(steps.observation.to(self.device), steps.action.to(self.device))
            numbers = torch.arange(self.replay.inserted - count, self.replay.inserted)
            self.replay.update(numbers, priority.cpu())

    # -- batches -----------------------------------------------------------------------------------------

    def next(self, env_steps: int, episodes: Sequence[Episode]) -> Batch:
        """Draw a batch; its data are None if ``alive`` has requested a stop while the model was fitted.

        env_steps, episodes: number of env steps, and ended episodes, since the last batch.
        """
        if self.batches % self.config.fit_batches == 0:
            transitions = {name: self.replay.rows.column(name)[: len(self.replay)] for name in _MODELLED}
            if not self._learner.fit(transitions, lambda: self.alive(env_steps)):
                return Batch(None, env_steps, episodes)
        is_due = self.batches % self.config.rollout_batches == 0
        if is_due or not len(self.model_replay):
            self.roll_out(is_due)
        self.batches += 1
        self._drawn_batches += 1
        return Batch(on_device(self.draw(), self.device), env_steps, episodes)

    def roll_out(self, is_due: bool) -> None:
        """Do a round of rollouts, from states of the real replay.

        is_due: whether all replicas do one now; otherwise only this one, as its model replay is empty.
        """
        self._resize_model_replay(self.rollouts.length_after(self.batches / self.config.updates_per_step))
        draw = self._sampler.draw_any(self.rollouts.starts, self._beta())
        observation = self.replay.rows.column("observation")[draw.indices].to(self.device)
        weights = {RECORDED + WEIGHT: draw.weights / draw.weights.max()} if self.requires.priorities else {}
        for _ in range(self._length):
            step = self._learner.imagine(observation, is_due)
            values = {name: getattr(step, name).cpu() for name in _MODELLED}
            discount = torch.where(step.terminated.cpu(), 0.0, self.requires.discount)
            self.model_replay.insert({**values, "discount": discount, **weights}, len(discount))
            self.imagined += len(discount)
            if step.priority is not None:
                self._sampler.update(draw.indices, step.priority.cpu())
            observation = step.next_observation[~step.terminated]
            if not len(observation):
                break

    def _resize_model_replay(self, length: int) -> None:
        """Resize the model's replay for rollouts of ``length`` steps, and copy its transitions."""
        if length == self._length:
            return
        old, self._length = self.model_replay, length
        self.model_replay = self._new_model_replay()
        # number of the first transition that is in the old replay and fits into the new one
        first = max(0, old.inserted - self.model_replay.sampler.capacity, old.inserted - old.sampler.capacity)
        for start in range(first, old.inserted, self.rollouts.starts):
            numbers = torch.arange(start, min(start + self.rollouts.starts, old.inserted))
            self.model_replay.insert(old.rows.read(numbers % old.sampler.capacity), len(numbers))

    def draw(self) -> Sample:
        real_count = int(self.requires.batch * self.config.real_share)
        imagined_count = self.requires.batch - real_count
        samples = []
        if real_count:
            real = self.replay.sample(real_count, self._beta())
            real.weights = real.weights / real.weights.max()
            samples.append(real)
        if imagined_count:
            imagined = self.model_replay.sample(imagined_count, 1.0)
            # a transition has the weight of the real state from which its rollout began
            imagined.weights = imagined.behaviour.get(WEIGHT, imagined.weights)
            if real_count:
                # Weights of different segments are not comparable (Zhang 3.2.3). The greatest of a few real
                # ones is far less than that of a round, so real ones would weigh several times too much.
                real.weights = real.weights * (imagined.weights.mean() / real.weights.mean())
            samples.append(imagined)
        names = ("keys", "weights", *_MODELLED, "discount")
        joined: dict[str, Any] = {name: torch.cat([getattr(x, name) for x in samples]) for name in names}
        return Sample(**joined)

    def _beta(self) -> float:
        rollouts = self.rollouts
        return rollouts.beta + (rollouts.beta_end - rollouts.beta) * self._progress()

    # -- the rest of a ``Sampler`` -----------------------------------------------------------------------

    def fields(self) -> dict[str, Any]:
        return {
            "replay_transitions": len(self.replay),
            "model_replay_transitions": len(self.model_replay),
            "imagined_transitions": self.imagined,
            "rollout_length": self._length,
        }

    def state(self) -> dict[str, Any]:
        counters = {name: getattr(self, name) for name in ("batches", "played", "imagined")}
        replays = {"replay": self.replay.state(), "model_replay": self.model_replay.state()}
        return {**counters, "drawn": self._drawn_batches, "length": self._length, "replays": replays}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; do a ``fresh_start`` if it lacks a replay's contents."""
        self.imagined = int(state["imagined"])
        if not {"replay", "model_replay"} <= state["replays"].keys():
            return self.fresh_start(int(state["batches"]))
        self.batches, self.played = int(state["batches"]), int(state["played"])
        self._drawn_batches = int(state["drawn"])
        self._length = int(state["length"])
        self.replay.load(state["replays"]["replay"])
        self.model_replay = self._new_model_replay()
        self.model_replay.load(state["replays"]["model_replay"])

    def fresh_start(self, batches: int) -> None:
        """Begin after ``batches`` batches with empty replays: in the middle of a run, learn as soon as one
        can be drawn."""
        self.batches = batches
        self.played, self._drawn_batches = self.config.learning_starts if batches else 0, 0
        self.exact = False

    def close(self) -> None:
        """Do nothing: nothing has to be closed."""
