"""The centre's part of a run: a member that learns nothing and runs its strategy's ``serve``."""

from __future__ import annotations

import time

import torch

from murmurate.agents.interface import Agent
from murmurate.fabric.interface import Channel
from murmurate.record.recorder import Recorder
from murmurate.record.step_timer import Watch
from murmurate.replicator.replicator import Replicator
from murmurate.sources.bank_weights import channel_of_banks
from murmurate.training.checkpoint import write_part
from murmurate.training.data_record import refuse_another
from murmurate.training.divergence import Probe
from murmurate.training.loop import Learning
from murmurate.training.rejoin import Doorway, Pace
from murmurate.training.run import Run
from murmurate.training.worker import (
    FINAL,
    FINAL_REQUEST,
    SETTLE_SECONDS,
    Post,
    member_state,
    restore_counts,
    staging,
)
from murmurate.worlds.interface import spec_of


class Serving:
    """The last member of a run whose strategy has a centre."""

    def __init__(self, run: Run, post: Post) -> None:
        self.run, self.post = run, post
        self.replicator = Replicator(run.strategy, post.fabric)
        self.learner: Agent = run.learner(self.replicator.replicate, post.rank, spec_of(run.world))
        # the same channels in the same order as every learner's
        for replica in self.learner.replicas.values():
            Probe(replica, post.fabric, synchronous=False, replicas=run.replicas)
        self.meeting: Channel = post.fabric.channel("meeting", torch.zeros(4, dtype=torch.float64))
        if run.shares_banks:
            channel_of_banks(post.fabric)
        self.recorder = Recorder(
            post.folder / "metrics.jsonl", None, post.started_at, offset_seconds=post.offset_seconds
        )
        self.watch = Watch(lambda: self.recorder.seconds, list(self.replicator.bonds.values()))
        self._last_record = time.monotonic()
        self._warned = False
        self.answered = 0
        self.pace = Pace()
        self.doorway = (
            None if post.admission is None else Doorway(post.admission, self.replicator, post.folder)
        )
        if post.restored is not None:
            self.replicator.load(post.restored.state["replicas"])
            restore_counts(self.replicator, post.restored.state)
            self.meeting.gather(torch.zeros(4, dtype=torch.float64))
            self.replicator.resumed()
            self.meeting.gather(torch.zeros(4, dtype=torch.float64))

    def go(self) -> None:
        """Serve until every living replica has finished, then leave the last part of the checkpoint."""
        run_state = self.post.run_state
        self.replicator.publish()
        shown = self._folds()
        while not run_state.finished_all(self.run.replicas):
            if not self._serve() and self._folds() != shown:
                self.replicator.publish()  # nobody asks for anything: show what has become of it
                shown = self._folds()
            self.watch.lap("exchange")
            self._save(run_state.checkpoint_requested)
            self._record()
            self.post.between()
            run_state.beat(self.post.rank)
            if (seconds := self.pace.tick()) is not None:
                run_state.set_pace(self.post.rank, seconds)
            if self.doorway is not None:
                self.doorway.welcome()
            self.watch.turn()
        self._record(last=True)
        self.replicator.settle(FINAL_REQUEST, SETTLE_SECONDS)
        self.replicator.publish()
        learned = any(run_state.clock(rank) for rank in range(self.run.replicas))
        if learned and (words := self.replicator.untouched):
            self.recorder.event("warning", words, member=self.post.rank)
        run_state.finished(self.post.rank)
        write_part(staging(self.post.folder, FINAL), self.post.rank, self._state())
        run_state.saved(self.post.rank, FINAL_REQUEST)
        self.recorder.close()

    def _serve(self) -> bool:
        bonds = self.replicator.bonds.values()
        with torch.no_grad():
            # a list: each has its turn
            served = [bond.strategy.serve(bond.replica, bond.channel) for bond in bonds]
        return any(served)

    def _folds(self) -> int:
        return sum(bond.replica.clock for bond in self.replicator.bonds.values())

    def _record(self, last: bool = False) -> None:
        """A line of ``kind`` "centre": it has no env steps, and is not counted among the replicas."""
        now = time.monotonic()
        if now - self._last_record < self.run.record_every_seconds and not last:
            return
        self._last_record = now
        if not self._warned and (words := self.replicator.refused_all):
            self._warned = True
            self.recorder.event("warning", words, member=self.post.rank)
        self.recorder.record(
            {
                "kind": "centre",
                "member": self.post.rank,
                "updates": self._folds(),
                "waiting_seconds": self.replicator.waiting_seconds,
                "bytes_exchanged": self.replicator.bytes_exchanged,
                **self.watch.fields(last=last),
            }
        )

    def _save(self, asked: int) -> None:
        if asked <= self.answered:
            return
        self.answered = asked
        if self.replicator.settle(asked, SETTLE_SECONDS):
            self.replicator.publish()
            write_part(staging(self.post.folder, str(asked)), self.post.rank, self._state())
            self.post.run_state.saved(self.post.rank, asked)
        else:
            self.post.run_state.skipped(self.post.rank, asked)

    def _state(self) -> dict[str, object]:
        return member_state(self.replicator, self.recorder.seconds) | {
            "exact": True,
            "env_steps": 0,
            "updates": self._folds(),
        }


def member(run: Run, post: Post) -> Learning | Serving:
    """What ``post.rank`` does in ``run``: the ranks after the replicas are the centre's.

    Raises Refusal where this process reads another corpus than the run began with, or a table of another size
    (whose numbers the launcher has compared).
    """
    refuse_another(post.folder, run.world, thorough=False)
    return Learning(run, post) if post.rank < run.replicas else Serving(run, post)
