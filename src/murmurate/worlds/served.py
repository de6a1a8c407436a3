"""Simulators that run in a separate process, the game server (``_game_server.py``).

When this process ends, for whatever reason, so do the server and the processes that its games have started. A
game that crashes, hangs or returns something that is not a frame is replaced by a new one: its episode ends
truncated, with its last frame and a reward of 0, and is not among ``TimeStep.episodes``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate import errors
from murmurate.buffers import Pool, as_tensor
from murmurate.native.system_calls import unnamed_file
from murmurate.spec import EnvSpec, TimeStep, derive_seed
from murmurate.worlds._game_messages import FAILED, LOAD, OPEN, REFUSED, RESET, SAVE, STEP, receive, send
from murmurate.worlds._game_server import START_SECONDS, Settings, Shared
from murmurate.worlds._numbers import check_actions
from murmurate.worlds.array_trees import to_arrays, to_tensors
from murmurate.worlds.episodes import EpisodeCounter
from murmurate.worlds.generators import simulator_seed
from murmurate.worlds.interface import Picture, first_step

HANG_SECONDS = 10.0  # time after which a step of a game counts as hung
# longest wait for an answer, besides the time to start games; the server itself replaces games that hang
_SERVER_SECONDS = 90.0
_MOST_FAILURES = 3  # consecutive failures of the server; one more ends the run
_STEPS_TO_RECOVER = 10  # steps without a failure after which failures are counted from 0 again
_CLOSE_SECONDS = 5.0  # longest wait for the server to end


class ServedSimulators:
    """``B`` games of one world. Observations are [B, ...] in float32 or uint8; where the spec is ``stacked``,
    [B, stack * C, H, W], the newest frame last. Vector actions are clipped to their bounds.

    game: "module:Class" of a ``Game``, made with ``options``. first: index of the first simulator. scale:
    factor of the rewards that an agent learns from; returns of episodes are unscaled. threads: number of
    threads of the server that step games. screen: shape [H, W, 3] of pictures of simulator 0, if they are
    wanted. hang_seconds: time after which a step of a game counts as hung.
    savable: whether the games' states can be saved. If not, a resumed run begins new episodes.
    own_folder: whether the working directory of the games is a temporary one, for games that write their
    settings there.

    Raises RunFailed once a game or the server has failed too often in a row, and in ``reset`` Refusal for a
    game that cannot be started here.
    """

    def __init__(
        self,
        spec: EnvSpec,
        game: str,
        options: Mapping[str, Any],
        size: int,
        *,
        first: int = 0,
        scale: float = 1.0,
        threads: int = 1,
        screen: tuple[int, int, int] | None = None,
        hang_seconds: float = HANG_SECONDS,
        savable: bool = False,
        own_folder: bool = True,
    ) -> None:
        self.spec, self.size, self._first, self._scale = spec, size, first, scale
        self._low, self._high = (np.array(bound, np.float32) for bound in (spec.action_low, spec.action_high))
        self._stack = spec.observation_shape[0] // spec.channels if spec.stacked else 1
        self._frame = spec.observation_shape
        if spec.stacked:
            self._frame = (spec.channels, *spec.observation_shape[1:])
        self._memory = unnamed_file("murmurate-games")
        self._settings = Settings(
            game=game,
            options=options,
            name=spec.name,
            size=size,
            first=first,
            frame=self._frame,
            dtype="uint8" if spec.observation_dtype == torch.uint8 else "float32",
            action=spec.action_shape,
            screen=screen,
            threads=threads,
            hang_seconds=hang_seconds,
            descriptor=self._memory,
        )
        self._shared = Shared(self._settings)
        self._pool = Pool()
        self._counter = EpisodeCounter(size)
        self._observation = self._empty()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._own_folder, self._folder = own_folder, ""
        self._savable = savable
        self._steps = 0  # of each simulator in the whole run
        self._seed, self._failures, self._steps_since_failure = 0, 0, 0

    def reset(self, seed: int) -> TimeStep:
        self._seed, self._failures, self._steps_since_failure = seed, 0, 0
        self._counter.clear()
        messages = self._begin()
        step = first_step(self._first_stacks())
        step.restarts = messages
        return step

    def send(self, action: Tensor) -> None:
        with contextlib.suppress(OSError, EOFError):  # a server that is gone is noticed by ``receive``
            self._request(STEP, self._checked_action(action).tobytes())

    def _checked_action(self, action: Tensor) -> npt.NDArray[Any]:
        """The actions as the server takes them: clipped vectors in float32, or numbers in int64."""
        chosen = action.numpy()
        if not self.spec.actions:
            flat = chosen.reshape(self.size, -1)
            clipped: npt.NDArray[Any] = np.clip(flat, self._low, self._high)
            return clipped.astype(np.float32)
        check_actions(chosen, self.spec.actions, self.spec.name)
        return chosen.astype(np.int64)

    def receive(self) -> TimeStep:
        shared = self._shared
        self._steps += 1
        try:
            messages, figures = self._told()
        except (OSError, EOFError) as problem:
            return self._replace_server(problem)
        self._steps_since_failure += 1
        if self._steps_since_failure == _STEPS_TO_RECOVER:
            self._failures = 0
        observation = self._empty()
        stacks, old_stacks = self._stacks(observation), self._stacks(self._observation)
        stacks[:, :-1], stacks[:, -1] = old_stacks[:, 1:], shared.frame
        reward, terminated, truncated = shared.reward, shared.terminated.copy(), shared.truncated.copy()
        self._counter.tick(reward)
        step = TimeStep(
            observation,
            torch.from_numpy((reward * self._scale).astype(np.float32)),
            torch.from_numpy(terminated),
            torch.from_numpy(truncated),
            restarts=messages,
        )
        over = terminated | truncated
        if over.any():
            # rows with a final observation: see ``TimeStep.final_observation``
            rows = over if observation.is_floating_point() else truncated
            if rows.any():
                step.final_observation = observation.clone()
                self._stacks(step.final_observation)[rows, -1] = shared.final[rows]
            stacks[over] = shared.frame[over, None]
            self._counter.clear(shared.lost)
            successes = [None if flag < 0 else bool(flag) for flag in shared.success.tolist()]
            step.episodes = self._counter.finish(over & ~shared.lost, successes, figures)
        self._observation = observation
        return step

    def state(self) -> dict[str, Any] | None:
        if not self._savable or self._process is None:
            return None
        try:
            self._request(SAVE)
            games = self._answer()
        except (OSError, EOFError):
            self.close()  # a late answer would be taken for that of the next step, which replaces the server
            return None
        if None in games:
            return None
        return {
            "games": to_tensors(games),
            "observation": self._observation.clone(),
            "episodes": self._counter.state(),
            "seed": self._seed,
            "steps": self._steps,
        }

    def load(self, state: dict[str, Any]) -> TimeStep:
        if not self._savable:
            raise ValueError(f"{self.spec.name} cannot be saved, so there is no state to load: call reset")
        if self._process is None:
            self._open()
        self._seed, self._steps = state["seed"], state["steps"]
        try:
            self._request(LOAD, pickle.dumps((self._steps, to_arrays(state["games"]))))
            self._answer()
        except (OSError, EOFError, errors.RunFailed) as problem:
            raise ValueError(f"{self.spec.name} does not go on from this state: {problem}") from problem
        self._counter.load(state["episodes"])
        self._observation = state["observation"].clone()
        self._shared.frame[:] = self._stacks(self._observation)[:, -1]
        return first_step(self._observation)

    def picture(self) -> Picture:
        if self._shared.screen is None:
            raise ValueError("no picture: open the world with picture=True, then reset")
        return self._shared.screen.copy()

    def close(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is None or connection is None:
            return
        connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CLOSE_SECONDS)
        _kill(process)
        shutil.rmtree(self._folder, ignore_errors=True)  # a server that was killed has not removed it

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
            os.close(self._memory)

    def _begin(self) -> tuple[str, ...]:
        """Begin new episodes in all games. Returns messages about the games and servers that failed meanwhile
        and were replaced."""
        messages: tuple[str, ...] = ()
        while True:
            try:
                if self._process is None:
                    self._open()
                seeds = [simulator_seed(self._seed, self._first + b) for b in range(self.size)]
                self._request(RESET, pickle.dumps((self._steps, seeds)))
                return messages + self._told()[0]
            except (OSError, EOFError) as problem:
                messages += self._note_failure(problem)
                self._draw_seed()

    def _draw_seed(self) -> None:
        """Draw a new seed: with the old one a new server might fail in the same way."""
        self._seed = derive_seed(self._seed, "replaced games", self._failures)

    def _note_failure(self, problem: Exception) -> tuple[str, ...]:
        """Close what is left of the failed server. Returns a message for each simulator.

        Raises RunFailed if the server has failed more than ``_MOST_FAILURES`` times in a row.
        """
        self._failures, self._steps_since_failure = self._failures + 1, 0
        failure = "gave no answer"
        if self._process is not None:
            if not isinstance(problem, TimeoutError):  # the server closed the socket, so it is about to end
                with contextlib.suppress(subprocess.TimeoutExpired):
                    failure = f"ended with code {self._process.wait(_CLOSE_SECONDS)}"
            _kill(self._process)
        self.close()
        last = self._first + self.size - 1
        cause = f"the process of {self.spec.name} (simulators {self._first} to {last}) {failure}"
        if self._failures > _MOST_FAILURES:
            raise errors.RunFailed(f"{cause}, {self._failures} times in a row. See logs/ in the run folder.")
        return tuple([f"{cause} and is started again"] * self.size)

    def _replace_server(self, problem: Exception) -> TimeStep:
        """Replace the server, which failed by ``problem``. Returns a step that truncates all episodes."""
        messages = self._note_failure(problem)
        self._draw_seed()
        messages += self._begin()
        final = self._observation.clone()
        stacks, old_stacks = self._stacks(final), self._stacks(self._observation)
        # the lost step has no frame of its own: the last one is repeated
        stacks[:, :-1], stacks[:, -1] = old_stacks[:, 1:], old_stacks[:, -1]
        self._counter.clear()
        step = first_step(self._first_stacks())
        step.truncated, step.final_observation, step.restarts = ~step.truncated, final, messages
        return step

    # -- the server -----------------------------------------------------------------------------------

    def _open(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="murmurate-games-") if self._own_folder else ""
        client_end, server_end = socket.socketpair()
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "murmurate.worlds._game_server"],
                stdin=server_end.fileno(),
                pass_fds=(self._memory,),
                start_new_session=True,  # a process group, so that the processes of the games are killed too
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._connection = client_end
        settings = dataclasses.replace(self._settings, folder=self._folder)
        send(client_end, OPEN, pickle.dumps(settings))

    def _request(self, kind: bytes, payload: bytes = b"") -> None:
        if self._connection is None:
            raise EOFError("it is not open")
        # RESET and LOAD may start all games before they answer: each thread starts one after the other
        starts = math.ceil(self.size / self._settings.threads) if kind in (RESET, LOAD) else 0
        self._connection.settimeout(_SERVER_SECONDS + START_SECONDS * starts)
        send(self._connection, kind, payload)

    def _told(self) -> tuple[tuple[str, ...], dict[int, dict[str, float]]]:
        """(messages about replaced games, figures of episodes that ended, by game). Raises as ``_answer``."""
        messages, figures = self._answer() or ((), {})
        return tuple(messages), figures

    def _answer(self) -> Any:
        """The server's answer, empty if there is nothing to say.

        Raises Refusal or RunFailed if the server answers with a failure.
        """
        if self._connection is None:
            raise EOFError("it is not open")
        kind, payload = receive(self._connection)
        if kind == REFUSED:
            self.close()
            raise errors.Refusal(payload.decode())
        if kind == FAILED:
            self.close()
            raise errors.RunFailed(payload.decode())
        return pickle.loads(payload) if payload else None

    # -- stacks ---------------------------------------------------------------------------------------

    def _empty(self) -> Tensor:
        shape, dtype = (self.size, *self.spec.observation_shape), self.spec.observation_dtype
        return as_tensor(self._pool.take(math.prod(shape) * dtype.itemsize), dtype).view(shape)

    def _stacks(self, observation: Tensor) -> npt.NDArray[Any]:
        """A view of ``observation`` as [B, stack, *shape of a frame]."""
        return observation.numpy().reshape(self.size, self._stack, *self._frame)

    def _first_stacks(self) -> Tensor:
        """Observations in which the first frame of an episode is repeated."""
        self._observation = self._empty()
        self._stacks(self._observation)[:] = self._shared.frame[:, None]
        return self._observation


def served_environments(
    spec: EnvSpec,
    make: str,
    options: Mapping[str, Any],
    size: int,
    first: int,
    screen: tuple[int, int, int] | None = None,
    **space_options: Any,
) -> ServedSimulators:
    """Gymnasium environments, made in a game server by ``make`` ("module:function") with ``options``.

    space_options: ``observe`` and ``joint_actions`` (``_spaces.py``).
    """
    game = "murmurate.worlds._env_game:EnvGame"
    game_options = {"make": make, "options": options, **space_options}
    return ServedSimulators(
        spec, game, game_options, size, first=first, screen=screen, savable=True, own_folder=False
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
