"""Draws batches from a replay at a fixed ratio to the inserted steps, for every source with a replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from murmurate.replay.config import ReplayConfig
from murmurate.replay.interface import Replay, Sample, Steps
from murmurate.replay.prefetch import Prefetcher
from murmurate.sources.bank_weights import BankWeights
from murmurate.spec import Batch, Episode, SequenceSample

Drawn = TypeVar("Drawn", Sample, SequenceSample)


@dataclass
class ReplayBatch(Batch):
    """A batch whose ``feedback`` updates the replay's priorities; ``data`` is a ``Sample``."""

    replay: Replay | None = None
    keys: Tensor | None = None

    def feedback(self, priorities: Tensor | None) -> None:
        if priorities is not None and self.replay is not None and self.keys is not None:
            self.replay.update(self.keys, priorities.detach().float().cpu())


class Sampler(Protocol):
    """Inserts the env steps of a ``ReplaySource``, and draws its batches."""

    @property
    def replay(self) -> Any:
        """The replay that stores the steps; it has a method ``restart(low, count)``."""
        ...

    @property
    def device(self) -> torch.device: ...
    @property
    def banks(self) -> BankWeights | None: ...
    @property
    def batches(self) -> int: ...
    @property
    def played(self) -> int:
        """Env steps so far."""
        ...

    @property
    def exact(self) -> bool: ...
    @property
    def due(self) -> bool:
        """Whether a batch is to be drawn before further env steps."""
        ...

    def before_steps(self) -> None: ...
    def insert(self, first_simulator: int, steps: Steps) -> None: ...
    def next(self, env_steps: int, episodes: Sequence[Episode]) -> Batch: ...
    def fields(self) -> dict[str, Any]: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...
    def fresh_start(self, batches: int) -> None: ...
    def close(self) -> None: ...


class ReplaySampler:
    """Inserts steps and draws batches, so that each transition is drawn ``samples_per_insert`` times on
    average.

    batch: transitions in a batch. progress: returns the completed share of the run, on which alpha and beta
    depend. banks: scales importance weights as if all learners drew from one replay, of which each has a
    bank. random_env_steps: env steps at a run's start whose actions are random, which a sampler that begins
    in the middle of a run counts as made.
    """

    def __init__(
        self,
        replay: Replay,
        config: ReplayConfig,
        batch: int,
        device: torch.device,
        progress: Callable[[], float],
        banks: BankWeights | None = None,
        random_env_steps: int = 0,
    ) -> None:
        self._random_env_steps = random_env_steps
        self.replay, self.config, self.batch, self.device = replay, config, batch, device
        self.banks = banks
        self.batches = self.played = self._drawn_transitions = 0
        self.exact = config.saved  # whether a killed and resumed run equals an uninterrupted one
        # two integers, because ``due`` is asked at each step, and arithmetic of fractions is slow
        self._draws, self._inserts = config.ratio.as_integer_ratio()
        self._progress = progress
        self._is_weighted = replay.sampler.weighted
        self._prefetcher = Prefetcher(replay, batch, config.ahead, device.type == "cuda", self._weigh)
        self._was_read: torch.cuda.Event | None = None  # whether a GPU has read the last batch

    @property
    def due(self) -> bool:
        """Whether the replay holds a batch, and ``samples_per_insert`` allows drawing one."""
        allowed = self._draws * self.config.learnable(self.played) // self._inserts
        return self._drawn_transitions + self.batch <= allowed and len(self.replay) >= self.batch

    def before_steps(self) -> None:
        """To be called before ``insert``: waits until prefetched batches are copied out of slots that the
        next steps may overwrite."""
        if self.replay.full:
            self._prefetcher.drain()

    def insert(self, first_simulator: int, steps: Steps) -> None:
        """Insert one step of each of the simulators ``first_simulator``, ``first_simulator`` + 1, ..."""
        self.replay.observe(first_simulator, steps)
        self.played += len(steps.reward)

    def next(self, env_steps: int, episodes: Sequence[Episode]) -> Batch:
        """Draw a batch. env_steps, episodes: number of env steps, and ended episodes, since the last one."""
        self._drawn_transitions += self.batch
        self.batches += 1
        if self.config.alpha_end is not None:
            self.replay.sampler.set_alpha(self.config.alpha_at(self._progress()))
        if self._was_read is not None:  # its page-locked memory is written again now
            self._was_read.synchronize()
        sample = self._prefetcher.next(self._beta())
        data = on_device(sample, self.device)
        if self.device.type == "cuda":
            self._was_read = torch.cuda.current_stream(self.device).record_event()
        replay = self.replay if self._is_weighted else None  # else there are no priorities
        return ReplayBatch(data, env_steps, episodes, replay=replay, keys=sample.keys)

    def _weigh(self, weights: Tensor, beta: float) -> None:
        if self.banks is not None:
            self.banks.weigh(weights, *self.replay.sampler.mass, beta)
        elif self._is_weighted:
            # divided by the batch's greatest weight: the replay's greatest weight may belong to a transition
            # with an error near 0, and would shrink all update steps
            weights.div_(weights.max())

    def _beta(self) -> float:
        return self.config.beta_at(self._progress())

    def fields(self) -> dict[str, Any]:
        inserted = max(self.played - self.config.learning_starts, 1)
        return {
            "replay_transitions": len(self.replay),
            "samples_per_insert": self._drawn_transitions / inserted,
            "beta": self._beta(),
            **({} if self.config.alpha_end is None else {"alpha": self.config.alpha_at(self._progress())}),
        }

    def state(self) -> dict[str, Any]:
        replays: dict[str, Any] = {}
        if self.config.saved:
            replays["replay"] = {"store": self.replay.state(), "ahead": self._prefetcher.state()}
        return {
            "batches": self.batches,
            "played": self.played,
            "drawn": self._drawn_transitions,
            "replays": replays,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; do a ``fresh_start`` if it lacks the replay's contents."""
        contents = state["replays"].get("replay")
        if contents is None:
            return self.fresh_start(int(state["batches"]))
        self.batches = int(state["batches"])
        self.played, self._drawn_transitions = int(state["played"]), int(state["drawn"])
        self.replay.load(contents["store"])
        self._prefetcher.load(contents["ahead"])

    def fresh_start(self, batches: int) -> None:
        """Begin after ``batches`` batches with an empty replay.

        In the middle of a run, learn as soon as a batch can be drawn; in the middle of a fit, draw as many of
        its batches as peers that went on have left.
        """
        config = self.config
        self.batches, self.exact = batches, False
        begun = config.begun_anew(self._random_env_steps) if batches else (0, 0)
        self.played, self._drawn_transitions = begun
        if config.fit_every:
            batches_of_fit = int(config.fit_every * config.ratio / self.batch)
            self._drawn_transitions += batches % batches_of_fit * self.batch

    def close(self) -> None:
        self._prefetcher.close()


def on_device(sample: Drawn, device: torch.device) -> Drawn:
    """Move a drawn batch, its tensors and those in ``behaviour``, to the learner's device."""
    if device.type == "cpu":
        return sample
    fields = vars(sample).items()
    moved = {name: x.to(device, non_blocking=True) for name, x in fields if name != "behaviour"}
    behaviour = {name: x.to(device, non_blocking=True) for name, x in sample.behaviour.items()}
    return dataclasses.replace(sample, **moved, behaviour=behaviour)
