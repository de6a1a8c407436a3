"""A replica over several devices: one flat vector each, stepped together (TF-Replicator, 3.2)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from murmurate.replica.clipping import check_loss, check_norm, factor
from murmurate.replica.vector import Exchange, Replica

_PATIENCE_SECONDS = 3600.0  # far above any fabric's own deadline, whose error names the member


class ModelParallelReplica:
    """The shards of one model-parallel replica: one backward pass, one step of the strategy each.

    ``clip`` bounds the norm of the whole gradient: after any averaging, over all shards together.
    """

    def __init__(self, name: str, shards: Sequence[Replica], clip: float | None) -> None:
        self.name, self.shards, self.clip = name, list(shards), clip
        self.gradient_norm: Tensor | None = None

    @property
    def clock(self) -> int:
        return self.shards[0].clock

    def __len__(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def descend(self, loss: Tensor) -> Exchange:
        """As ``Replica.descend``, for the parameters of all shards. Raises NotFinite before any change."""
        check_loss(loss, self.name, self.clock)
        for shard in self.shards:
            shard.grad.zero_()
        loss.backward(inputs=[p for s in self.shards for p in s.own_parameters()])  # type: ignore[no-untyped-call]
        if self.clock == 0:
            for shard in self.shards:
                shard.check()
        return self._step([shard.grad for shard in self.shards])

    def follow(self, gradients: Sequence[Tensor]) -> Exchange:
        """One step along closed-form gradients, one [N_k] a shard."""
        return self._step(gradients)

    def _step(self, gradients: Sequence[Tensor]) -> Exchange:
        if self.clip is None or len(self.shards) == 1:
            exchanges = [s.follow(g) for s, g in zip(self.shards, gradients, strict=True)]
        else:
            exchanges = self._step_clipped(gradients)
        return Exchange(
            round=min(e.round for e in exchanges),
            heard=min(e.heard for e in exchanges),
            staleness=max(e.staleness for e in exchanges),
        )

    def _step_clipped(self, gradients: Sequence[Tensor]) -> list[Exchange]:
        """Every shard's step up to its update; then the norm over all; then the rest of each.

        The norm is that of the averaged gradients of all shards, but a strategy is one function that
        averages and
        updates: so each shard has a thread, and one of them runs at a time, in order.
        """
        turns = [_PausedStep(shard, gradient) for shard, gradient in zip(self.shards, gradients, strict=True)]
        try:
            while any(not turn.ended for turn in turns):
                for turn in turns:
                    turn.go_on()
                waiting = [turn.shard for turn in turns if not turn.ended]
                if waiting:
                    self._clip(waiting)
        finally:
            for turn in turns:
                turn.leave()
        return [turn.result() for turn in turns]

    def _clip(self, shards: Sequence[Replica]) -> None:
        home = shards[0].device
        norms = torch.stack([torch.linalg.vector_norm(s.grad).to(home) for s in shards])
        norm = torch.linalg.vector_norm(norms)
        check_norm(norm.item(), self.name, self.clock)
        self.gradient_norm = norm
        shorter = factor(norm, math.inf if self.clip is None else self.clip)
        for shard in shards:
            shard.gradient_norm = norm.to(shard.device)
            shard.grad.mul_(shorter.to(shard.device))

    def state(self) -> dict[str, Any]:
        return {shard.name: shard.state() for shard in self.shards}

    def load(self, state: dict[str, Any]) -> None:
        for shard in self.shards:
            shard.load(state[shard.name])


class _PausedStep:
    """One shard's step in a thread that pauses before each update until ``go_on``."""

    def __init__(self, shard: Replica, gradient: Tensor) -> None:
        self.shard, self.ended = shard, False
        self._gradient = gradient
        self._update: Callable[[], None] = shard.update
        self._replaced = shard.__dict__.get("update")
        self._mine, self._ours = threading.Semaphore(0), threading.Semaphore(0)
        self._exchange: Exchange | None = None
        self._error: BaseException | None = None
        self._left = False
        self._thread = threading.Thread(target=self._live, daemon=True, name=f"{shard.name}-step")
        self._thread.start()

    def go_on(self) -> None:
        """Let it run to its next update, or to its end. Raises what its step raised."""
        if self.ended:
            return
        self._mine.release()
        self._ours.acquire()
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        """Let a thread that still waits end without its update."""
        self._left = True
        if not self.ended:
            self._mine.release()
        self._thread.join(_PATIENCE_SECONDS)
        self.shard.__dict__.pop("update", None)
        if self._replaced is not None:
            self.shard.__dict__["update"] = self._replaced

    def result(self) -> Exchange:
        if self._exchange is None:
            raise RuntimeError(f"the step of '{self.shard.name}' did not end")
        return self._exchange

    def _live(self) -> None:
        self._mine.acquire()
        try:
            if not self._left:
                self.shard.update = self._pause_then_update  # type: ignore[method-assign]
                self._exchange = self.shard.follow(self._gradient)
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        self.ended = True
        self._ours.release()

    def _pause_then_update(self) -> None:
        self._ours.release()
        self._mine.acquire()
        if self._left:
            raise _Abandoned
        self._update()


class _Abandoned(BaseException):
    """Ends a shard's thread because another shard failed."""
