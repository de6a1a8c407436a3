"""The loop (design, section 3)."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from murmurate.fabric.interface import Channel
from murmurate.record.recorder import Recorder
from murmurate.record.step_timer import Watch
from murmurate.replicator.replicator import Replicator
from murmurate.sources.bank_weights import channel_of_banks
from murmurate.spec import Batch, Outcome, derive_generator
from murmurate.training.checkpoint import write_part
from murmurate.training.divergence import Probe
from murmurate.training.rejoin import Doorway, Pace, adopted
from murmurate.training.run import Run
from murmurate.training.worker import (
    FINAL,
    FINAL_REQUEST,
    SETTLE_SECONDS,
    Post,
    Restored,
    member_state,
    restore_counts,
    staging,
)

_FINISH_DEADLINE_SECONDS = 10.0
_BEAT_SECONDS = 1.0


class Learning:
    """One replica's part of a run: the loop of design section 3, and what surrounds it."""

    def __init__(self, run: Run, post: Post) -> None:
        self.run, self.post = run, post
        self.replicator = Replicator(run.strategy, post.fabric)
        groups = run.open_simulators()
        self.learner = run.learner(self.replicator.replicate, post.rank, run.spec(groups))
        self.source = run.source(post.rank, self.learner, groups)
        self.source.alive = self._alive
        self.synchronous = run.strategy.synchronous and post.fabric.size > 1
        self.probes = [
            Probe(replica, post.fabric, self.synchronous, run.replicas)
            for replica in self.learner.replicas.values()
        ]
        self.meeting: Channel = post.fabric.channel("meeting", torch.zeros(4, dtype=torch.float64))
        if run.shares_banks:
            self.source.share(channel_of_banks(post.fabric), run.replicas)
        self.recorder = Recorder(
            post.folder / "metrics.jsonl", post.rank, post.started_at, offset_seconds=post.offset_seconds
        )
        bonds = list(self.replicator.bonds.values())
        others = [self.meeting, *(probe.channel for probe in self.probes)]
        self.watch = Watch(lambda: self.recorder.seconds, bonds, others)
        self.env_steps = 0
        self.answered = 0  # number of the newest checkpoint request already served
        self.doorway = (
            None if post.admission is None else Doorway(post.admission, self.replicator, post.folder)
        )
        self.pace = Pace()
        self.returns: deque[float] = deque(maxlen=100)
        self.unreported: list[list[float]] = []
        self.probed: dict[str, Any] = {}
        self._last_record = time.monotonic()
        self._last_steps = 0
        if post.restored is not None:
            own = post.restored.own
            if own:
                self._restore(post.restored)
            # nobody steps on a shared vector that another is still filling
            self.meeting.gather(torch.zeros(4, dtype=torch.float64))
            if not own:  # it keeps what the others have put into memory that all share
                self._restore(post.restored)
            post.restored = None  # it may hold a whole replay
            self.replicator.resumed()
            self.meeting.gather(torch.zeros(4, dtype=torch.float64))
            if not own:
                self.replicator.entered()
        if post.joins and self.doorway is not None:
            self._join(self.doorway)

    def go(self) -> None:
        """Train until the run's end or a request to stop; leave a final checkpoint part."""
        self.replicator.publish()
        outcome: Outcome | None = None
        # a joiner stands where its peers have just consulted
        if self.post.joins or not self._over(self._consult()):
            for batch in self.source:
                self.watch.lap("collect")
                if batch.data is None:
                    self._count(batch)
                    break
                outcome = self.learner.learn(batch)
                batch.feedback(outcome.priorities)
                self.watch.lap("learn")
                self._count(batch)
                self._probe()
                self._record(outcome)
                for kind, words in self.source.events():
                    self.recorder.event(kind, words, member=self.post.rank)
                self.post.between()
                if self._round_ended():
                    wishes = self._consult()
                    self._serve(wishes)
                    if self._over(wishes):
                        break
                self.watch.turn()
        self._finish(outcome)

    # -- counting and recording ---------------------------------------------------------------------

    def _count(self, batch: Batch) -> None:
        self.env_steps += batch.env_steps
        for episode in batch.episodes:
            self.returns.append(episode.episode_return)
            self.unreported.append([episode.episode_return, episode.length])
        self.post.run_state.advance(self.post.rank, self.env_steps, self.learner.clock)
        if (seconds := self.pace.tick()) is not None:
            self.post.run_state.set_pace(self.post.rank, seconds)

    def _alive(self, played: int) -> bool:
        """A batch is long in coming: nobody has died. Synchronous members stop together, at a round."""
        self.post.run_state.advance(self.post.rank, self.env_steps + played, self.learner.clock)
        return self.post.run_state.stop_requested and not self.synchronous

    def _probe(self) -> None:
        every = self.run.probe_every_updates
        if not every or self.run.replicas == 1:
            return
        # one update early, so that a mean every so many updates has not just been taken
        if self.learner.clock % every == every - 1:
            for probe in self.probes:
                self.probed |= probe.look()
                if probe.replica.update_norm is not None:
                    self.probed["update_norm"] = float(probe.replica.update_norm)
        self._prepare_probe()

    def _prepare_probe(self) -> None:
        """Ask the update before a look for its size."""
        every = self.run.probe_every_updates
        if every and self.learner.clock % every == (every - 2) % every:
            for probe in self.probes:
                probe.replica.measure = True

    def _record(self, outcome: Outcome, force: bool = False) -> None:
        now = time.monotonic()
        passed = now - self._last_record
        if passed < self.run.record_every_seconds and not force:
            return
        bonds = list(self.replicator.bonds.values())
        self.recorder.record(
            {
                "env_steps": self.env_steps,
                "updates": self.learner.clock,
                "total_env_steps": self.post.run_state.total_env_steps(),
                "env_steps_per_second": (self.env_steps - self._last_steps) / max(passed, 1e-9),
                "return_mean": sum(self.returns) / len(self.returns) if self.returns else None,
                "episode_returns": self.unreported,
                **outcome.told(),
                "staleness": max(b.last.staleness for b in bonds),
                "staleness_max": max(b.staleness_max for b in bonds),
                "heard": bonds[0].last.heard,
                "rounds": bonds[0].last.round,
                "waiting_seconds": self.replicator.waiting_seconds,
                "bytes_exchanged": self.replicator.bytes_exchanged,
                "refused": self.replicator.refused,
                **self.source.fields(),
                **self.probed,
                **self.watch.fields(last=force),
            }
        )
        self.unreported, self.probed = [], {}
        self._last_record, self._last_steps = now, self.env_steps

    # -- agreeing on when to stop and save ----------------------------------------------------------

    def _round_ended(self) -> bool:
        """Synchronous members may decide only where all are at the same clock: at the end of a round, or
        after the last update that was asked for, which they all count."""
        if not self.synchronous or self.learner.clock >= (self.run.updates or math.inf):
            return True
        return self.replicator.between_rounds

    def _consult(self) -> tuple[bool, int, int]:
        """(stop?, newest checkpoint asked for, total env steps), the same on all synchronous members."""
        run_state = self.post.run_state
        stop, asked = run_state.stop_requested, run_state.checkpoint_requested
        if not self.synchronous:
            if self.doorway is not None:
                self.doorway.attend(self._gift)
            return stop, asked, run_state.total_env_steps()
        mine = torch.tensor([stop, asked, self.env_steps, run_state.hand_over], dtype=torch.float64)
        answers = self.meeting.gather(mine)
        absent = [rank for rank in range(run_state.size) if rank not in answers]
        total = sum(int(a[2]) for a in answers.values()) + sum(run_state.env_steps(r) for r in absent)
        wishes = (
            any(bool(a[0]) for a in answers.values()),
            min(int(a[1]) for a in answers.values()),
            total,
        )
        hand_over = min(int(a[3]) for a in answers.values())
        if self.doorway is not None and wishes[1] <= self.answered and not self._over(wishes):
            self.doorway.admit_together(hand_over, self._meet, self._gift)
        return wishes

    def _meet(self) -> list[int]:
        """A round of its own: who came."""
        return sorted(self.meeting.gather(torch.zeros(4, dtype=torch.float64)))

    def _gift(self) -> dict[str, Any]:
        """What a joiner takes over (design, section 1): parameters, moments, clock, strategy."""
        return {
            "replicas": self.replicator.state(),
            "learner": self.learner.state(),
            "source": {"batches": self.learner.clock},
            "answered": self.answered,
        }

    def _join(self, doorway: Doorway) -> None:
        """Take a living peer's state and place. Raises NotLetIn if the run ends first."""
        gift = doorway.take()
        self._restore(Restored(gift, self.post.run_state.env_steps(self.post.rank), own=False))
        self.answered = int(gift["answered"])
        doorway.enter(gift)

    def _over(self, wishes: tuple[bool, int, int]) -> bool:
        stop, _, total = wishes
        run = self.run
        return (
            stop
            or (run.env_steps is not None and total >= run.env_steps)
            or (run.updates is not None and self.learner.clock >= run.updates)
        )

    def _serve(self, wishes: tuple[bool, int, int]) -> None:
        _, asked, _ = wishes
        if asked > self.answered:
            self.answered = asked
            if self.replicator.settle(asked, SETTLE_SECONDS):
                self._save(str(asked))
                self.post.run_state.saved(self.post.rank, asked)
            else:
                self.post.run_state.skipped(self.post.rank, asked)

    def _save(self, name: str) -> None:
        state = self.state()
        replay = state["source"].pop("replay", None)
        with self._beating():
            write_part(staging(self.post.folder, name), self.post.rank, state, replay)

    @contextlib.contextmanager
    def _beating(self) -> Iterator[None]:
        """Say that this member lives while it writes: gigabytes take longer than silence is allowed to."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_BEAT_SECONDS):
                self.post.run_state.beat(self.post.rank)

        thread = threading.Thread(target=beat, daemon=True)
        if self.run.replay is not None:
            thread.start()
        try:
            yield
        finally:
            done.set()

    def _finish(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self._record(outcome, force=True)
        if not self.replicator.settle(FINAL_REQUEST, SETTLE_SECONDS):
            self.recorder.event(
                "unsettled",
                f"replica {self.post.rank}: some deltas in flight at the end were not taken in "
                f"within {SETTLE_SECONDS:g} s",
                member=self.post.rank,
            )
        self.replicator.publish()
        run_state = self.post.run_state
        run_state.finished(self.post.rank)
        deadline = time.monotonic() + _FINISH_DEADLINE_SECONDS
        # all last vectors should be on show before anybody takes the mean of them
        while not self.synchronous and not run_state.finished_all() and time.monotonic() < deadline:
            self.meeting.wait("finished", 0.002)  # no such mail comes: time passes, a simulated fabric's too
        self._save(FINAL)
        run_state.saved(self.post.rank, FINAL_REQUEST)
        self.recorder.event("finished", f"replica {self.post.rank} has finished", member=self.post.rank)
        self.recorder.close()
        self.source.close()

    # -- state --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything this replica needs to go on; the members of a synchronous run call it together."""
        return member_state(self.replicator, self.recorder.seconds) | {
            "learner": self.learner.state(),
            "source": self.source.state(),
            "exact": self.source.exact,
            "env_steps": self.env_steps,
            "updates": self.learner.clock,
            "returns": list(self.returns),
            "unreported": self.unreported,
            "probed": self.probed,
        }

    def _restore(self, restored: Restored) -> None:
        state = restored.state
        theirs = state["replicas"]
        self.replicator.load(theirs if restored.own else adopted(self.replicator, theirs))
        self.learner.load(state["learner"])
        self.env_steps = self._last_steps = restored.env_steps
        if restored.own:
            self.source.load(state["source"])
            self.returns.extend(state["returns"])
            self.unreported = [list(pair) for pair in state["unreported"]]
            self.probed = dict(state.get("probed", {}))
            restore_counts(self.replicator, state)
        else:
            self.source.load(self._new_games(state["source"]))
        self._prepare_probe()
        self.post.run_state.advance(self.post.rank, self.env_steps, self.learner.clock)

    def _new_games(self, theirs: dict[str, Any]) -> dict[str, Any]:
        """A source's state that plays neither a peer's games again nor the own first ones; from an
        empty replay."""
        mine = self.source.state()
        device = self.run.device(self.post.rank)
        purpose = f"actions after batch {theirs['batches']}"
        generator = derive_generator(self.run.seed, purpose, self.post.rank, device)
        return {
            **mine,
            "batches": theirs["batches"],
            "groups": [None] * len(mine["groups"]),
            "replay": None,
            "generator": generator.get_state(),
        }
