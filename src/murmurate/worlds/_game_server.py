"""The game server, a process in which simulators run: ``python -m murmurate.worlds._game_server``, with a
socket as its standard input. ``served.py`` is the other end.

A game is one simulator of any kind. The process imports no torch. Several threads may step the games, which
helps where a game itself waits for another process. A game that raises, hangs or returns something that is
not a frame is replaced by a new one.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import pickle
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from murmurate.errors import Refusal, library_advice
from murmurate.worlds._failures import noted
from murmurate.worlds._game_messages import DONE, FAILED, REFUSED, RESET, SAVE, STEP, receive, send
from murmurate.worlds._numbers import LARGEST_REWARD, first_not_finite

Frame = npt.NDArray[Any]  # one observation: an image [C, H, W] in uint8, or any array of float32

MOST_FAILURES = 5  # consecutive failures of one game; one more ends the run
STEPS_TO_RECOVER = 10  # steps without a failure after which failures are counted from 0 again
_CHECK_SECONDS = 0.5  # interval of the checks for games that hang
_CLOSE_SECONDS = 4.0  # longest wait for the games to close
START_SECONDS = 60.0  # time allowed to start a game, or an episode


class Unusable(Refusal):
    """A game that cannot be started here. The message says what to install or to change."""


class Game(Protocol):
    """One game.

    success: whether the episode that ended last reached the goal; None where the game does not say.
    A game may have an attribute ``figures``: those of that episode (``spec.Episode``).
    """

    success: bool | None

    def begin(self, seed: int | None, steps: int) -> Frame:
        """Begin an episode; returns its first frame. seed: seed of this and the following episodes; None: go
        on with the generator. steps: steps of this simulator so far in the whole run."""
        ...

    def step(self, action: Any) -> tuple[Frame, float, bool, bool]:
        """Returns (frame, reward, terminated, truncated); the frame is ignored if it is an image and the
        episode terminated. action: a number, or an array of float32 within its bounds."""
        ...

    def picture(self) -> Frame:
        """A picture of the present state for people, in the size of the screen [H, W, 3]."""
        ...

    def kill(self) -> bool:
        """Make a ``begin`` or ``step`` that hangs raise; called by another thread. False: impossible."""
        ...

    def state(self) -> dict[str, Any] | None:
        """Arrays and plain JSON values to continue from exactly; None where that is not possible."""
        ...

    def load(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Settings:
    """What a server is opened with.

    game: "module:Class" of a ``Game``, made with ``options``; its import must not import torch.
    name: of the world, for messages. size: number of games. first: number of the first game, for messages.
    frame: shape of a frame. dtype: dtype of frames, uint8 or float32.
    action: shape of an action; () where it is a number.
    screen: shape of a picture of game 0, if one is wanted. threads: number of threads that step games.
    hang_seconds: time after which a step counts as hung. descriptor: of the shared memory (see ``Shared``).
    folder: the working directory, removed at the end; empty: where the process is started.
    """

    game: str
    options: Mapping[str, Any]
    name: str
    size: int
    first: int
    frame: tuple[int, ...]
    dtype: str
    action: tuple[int, ...]
    screen: tuple[int, int, int] | None
    threads: int
    hang_seconds: float
    descriptor: int
    folder: str = ""

    def make(self) -> Game:
        """One new game. Raises ``Refusal`` if what it needs cannot be imported."""
        module, _, class_name = self.game.partition(":")
        try:
            game: Game = getattr(importlib.import_module(module), class_name)(**self.options)
        except ImportError as problem:
            cause = f"{str(problem).rstrip('.')}.{library_advice(problem)}"
            raise Unusable(f"The world {self.name} cannot be opened here: {cause}") from problem
        return game


class Shared:
    """The results of a step, in memory that both processes map.

    frame: [B, ...], the newest frame of each game. final: [B, ...], last frames of truncated episodes, and,
    if frames are float32, of terminated ones.
    reward, terminated, truncated: [B]. lost: [B], whether the episode ended because its game was replaced.
    success: [B], 1 or 0 where the game says whether its episode reached the goal, else -1.
    screen: a picture of game 0, or None.
    """

    def __init__(self, settings: Settings) -> None:
        size, frame, screen = settings.size, settings.frame, settings.screen
        fields: list[tuple[str, Any, tuple[int, ...]]] = [
            ("frame", settings.dtype, (size, *frame)),
            ("final", settings.dtype, (size, *frame)),
            ("reward", np.float64, (size,)),
            ("terminated", np.bool_, (size,)),
            ("truncated", np.bool_, (size,)),
            ("lost", np.bool_, (size,)),
            ("success", np.int8, (size,)),
            ("screen", np.uint8, screen or (1,)),
        ]
        layout = np.dtype(fields, align=True)
        os.ftruncate(settings.descriptor, layout.itemsize)
        memory = np.frombuffer(mmap.mmap(settings.descriptor, layout.itemsize), layout)
        views: list[Any] = [memory[name][0] for name, *_ in fields]
        self.frame, self.final, self.reward, self.terminated, self.truncated, self.lost = views[:6]
        self.success = views[6]
        self.screen: Frame | None = views[7] if screen else None


class _GameSlot:
    """One game, and its place in the shared memory."""

    def __init__(self, settings: Settings, shared: Shared, index: int) -> None:
        self._settings, self._shared, self._index = settings, shared, index
        self._game: Game | None = None
        self._seed, self._failures, self._steps_since_failure, self._replacements = 0, 0, 0, 0
        self.steps = 0  # of this simulator in the whole run
        # of the running call of the game: (when it began, seconds allowed); None: there is none
        self._call: tuple[float, float] | None = None
        self.messages: list[str] = []
        self.figures: Mapping[str, float] = {}  # of an episode that ended in the last step

    @property
    def name(self) -> str:
        return f"{self._settings.name} (simulator {self._settings.first + self._index})"

    def begin(self, seed: int) -> None:
        self._seed, self._failures, self._steps_since_failure = seed, 0, 0
        try:
            self._begin(seed)
        except (Exception, SystemExit) as problem:
            if isinstance(problem, Refusal) and not self.steps:
                raise
            self._replace(problem)
        self._write_result(0.0, False, False)

    def step(self, action: Any) -> None:
        index, shared = self._index, self._shared
        self.steps += 1
        self.figures = {}
        try:
            with self._watched(self._settings.hang_seconds):
                assert self._game is not None
                frame, reward, terminated, truncated = self._game.step(action)
                if not abs(reward) <= LARGEST_REWARD:  # true for nan, too
                    raise ValueError(f"it gave {reward} as its reward: it must be finite in float32")
                if truncated or (terminated and shared.final.dtype == np.float32):
                    _copy(frame, shared.final[index])
                elif not terminated:
                    _copy(frame, shared.frame[index])
        except (Exception, SystemExit) as problem:
            shared.final[index] = shared.frame[index]  # the last frame before the failure
            self._replace(problem)
            self._write_result(0.0, False, True, lost=True)
            return
        if terminated or truncated:
            shared.success[index] = -1 if self._game.success is None else self._game.success
            self.figures = getattr(self._game, "figures", {})
            try:
                self._begin(None)
            except (Exception, SystemExit) as problem:
                self._replace(problem)
        self._steps_since_failure += 1
        if self._steps_since_failure == STEPS_TO_RECOVER:
            self._failures = 0
        self._write_result(reward, terminated, truncated)

    def kill_if_hung(self) -> bool:
        """Kill the game if its call takes too long. Returns True if the call cannot be ended."""
        call, game = self._call, self._game
        if call is None:
            return False
        seconds, allowed = time.monotonic() - call[0], call[1]
        return seconds >= allowed and (game is None or seconds > 2 * allowed or not game.kill())

    def save(self) -> dict[str, Any] | None:
        game = None if self._game is None else self._game.state()
        return None if game is None else {"game": game, "seed": self._seed, "replaced": self._replacements}

    def load(self, state: dict[str, Any]) -> None:
        self._seed, self._replacements = state["seed"], state["replaced"]
        with self._watched(START_SECONDS):
            if self._game is None:
                self._game = self._settings.make()
            self._game.load(state["game"])

    def close(self) -> None:
        if self._game is not None:
            with contextlib.suppress(Exception, SystemExit):
                self._game.close()
            self._game = None

    def _begin(self, seed: int | None) -> None:
        with self._watched(START_SECONDS):  # a simulator may load as much for an episode as at its start
            if self._game is None:
                self._game = self._settings.make()
            _copy(self._game.begin(seed, self.steps), self._shared.frame[self._index])

    def _replace(self, problem: BaseException) -> None:
        """Replace the game, which raised ``problem``, by a new one with another seed; begin an episode."""
        while True:
            self._failures, self._steps_since_failure = self._failures + 1, 0
            if isinstance(problem, Refusal):  # of a constructor that raised
                problem = problem.__cause__ or problem
            cause = f"{type(problem).__name__}: {problem}{noted(problem)}"
            if self._failures > MOST_FAILURES:
                raise RuntimeError(f"{self.name} failed {self._failures} times in a row, at last by {cause}")
            self.close()
            self._replacements += 1
            self.messages.append(f"{self.name} is started again after {cause}")
            entropy = np.random.SeedSequence([self._seed, self._replacements])
            try:
                return self._begin(int(entropy.generate_state(1, np.uint64)[0]))
            except (Exception, SystemExit) as another:
                problem = another

    def _write_result(self, reward: float, terminated: bool, truncated: bool, lost: bool = False) -> None:
        index, shared = self._index, self._shared
        shared.lost[index] = lost
        shared.reward[index] = reward
        shared.terminated[index] = terminated
        shared.truncated[index] = truncated and not terminated
        if index == 0 and shared.screen is not None and self._game is not None:
            _copy(self._game.picture(), shared.screen)

    @contextlib.contextmanager
    def _watched(self, seconds: float) -> Iterator[None]:
        """Within this context a call of the game counts as hung after ``seconds``."""
        self._call = time.monotonic(), seconds
        try:
            yield
        finally:
            self._call = None


def _copy(frame: Frame, to: Frame) -> None:
    if frame.shape != to.shape or frame.dtype != to.dtype:
        raise ValueError(
            f"it gave a frame of {frame.dtype} {list(frame.shape)}, not {to.dtype} {list(to.shape)}"
        )
    if to.dtype != np.uint8 and not np.isfinite(frame).all():
        raise ValueError(f"it gave {first_not_finite(frame, 'observation')}")
    to[...] = frame


class _Server:
    """Answers the requests of ``ServedSimulators``."""

    def __init__(self, settings: Settings) -> None:
        self._shared = Shared(settings)
        self._action = settings.action
        self._slots = [_GameSlot(settings, self._shared, b) for b in range(settings.size)]
        self._threads = min(settings.threads, settings.size)
        self._pool = ThreadPoolExecutor(self._threads)  # even for one: some games accept only their maker

    def answer(self, kind: bytes, payload: bytes) -> bytes:
        """Do what is asked. Returns a pickled answer: states for SAVE, else (messages about replaced games,
        figures of the episodes that ended, by game), or nothing if there are neither."""
        if kind == SAVE:
            return pickle.dumps(self._call_all(lambda slot, _: slot.save(), self._slots))
        if kind == STEP and self._action:
            self._call_all(
                _GameSlot.step, list(np.frombuffer(payload, np.float32).reshape(-1, *self._action))
            )
        elif kind == STEP:
            self._call_all(_GameSlot.step, np.frombuffer(payload, np.int64).tolist())
        else:
            steps, values = pickle.loads(payload)
            for slot in self._slots:
                slot.steps = steps
            self._call_all(_GameSlot.begin if kind == RESET else _GameSlot.load, values)
        messages = [message for slot in self._slots for message in slot.messages]
        for slot in self._slots:
            slot.messages.clear()
        figures = {b: slot.figures for b, slot in enumerate(self._slots) if slot.figures}
        return pickle.dumps((messages, figures)) if messages or figures else b""

    def close(self) -> None:
        wait([self._pool.submit(lambda: list(map(_GameSlot.close, self._slots)))], timeout=_CLOSE_SECONDS)

    def _call_all(self, call: Callable[[_GameSlot, Any], Any], values: Sequence[Any]) -> list[Any]:
        """The results of ``call(slot, value)`` for each slot; each idle thread takes the next slot."""
        # the threads share this iterator: ``next`` of a list's iterator is atomic
        calls = iter(list(enumerate(zip(self._slots, values, strict=True))))
        results: list[Any] = [None] * len(self._slots)

        def work() -> None:
            for index, (slot, value) in calls:
                results[index] = call(slot, value)

        pending: set[Future[None]] = {self._pool.submit(work) for _ in range(self._threads)}
        while pending:
            done, pending = wait(pending, timeout=_CHECK_SECONDS)
            for future in done:
                future.result()
            if sum(slot.kill_if_hung() for slot in self._slots):  # not any(), which would skip slots
                os._exit(4)  # this call cannot be ended: the other process starts another server
        return results


def main() -> None:
    # A scheduler may send SIGTERM to all processes of a job; the other process ends this one after the last
    # save. Programs and processes that games start do not inherit this.
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what games print goes to the log
    settings: Settings = pickle.loads(receive(connection)[1])
    server: _Server | None = None
    code = 0
    os.chdir(settings.folder or ".")
    try:
        server = _Server(settings)
        while True:
            kind, payload = receive(connection)
            try:
                send(connection, DONE, server.answer(kind, payload))
            except Refusal as problem:
                send(connection, REFUSED, str(problem).encode())
            except RuntimeError as problem:
                send(connection, FAILED, str(problem).encode())
            except (LookupError, TypeError, ValueError) as problem:
                # such as by LOAD for a state that does not fit the games
                send(connection, FAILED, f"{type(problem).__name__}: {problem}".encode())
    except (EOFError, ConnectionError):
        pass
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        if server is not None:
            server.close()
        shutil.rmtree(settings.folder, ignore_errors=True)
        os._exit(code)  # threads may still wait for a game that does not end


if __name__ == "__main__":
    from murmurate.worlds import _game_server  # games raise this module's ``Unusable``, not ``__main__``'s

    _game_server.main()
