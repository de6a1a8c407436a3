"""One game of ViZDoom, for the game server. Imports no torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import vizdoom

from murmurate.worlds._game_server import Frame, Unusable

cv2.setNumThreads(1)  # the server's own threads share the cores
SCREEN = (120, 160, 3)  # rows, columns, colours as rendered
SIDE = 84  # pixels of a frame, in each direction
_NAMES_OF_MEMORY = ("SM", "MQCtr", "MQDoom")  # ViZDoom's names of the memory that the two processes share
_WITH_GOAL = frozenset({"my_way_home", "deadly_corridor"})  # scenarios in which there is a place to reach
_REINSTALL = "Run: pip install --force-reinstall vizdoom"


def presses(buttons: int, combine: bool) -> list[list[bool]]:
    """For each action, whether each of the n buttons is pressed. With ``combine`` there are 2^n actions
    (button k is bit k of the action's number); otherwise n + 1: none, then each button alone."""
    if combine:
        return [list(reversed(bits)) for bits in itertools.product((False, True), repeat=buttons)]
    return [[k == pressed for k in range(buttons)] for pressed in range(-1, buttons)]


class DoomGame:
    """See ``Game``. The game runs in its own process, which ViZDoom starts.

    file: name of the scenario's file, without its ending. The other arguments: see ``DoomWorld``.
    """

    success: bool | None = None

    def __init__(
        self,
        *,
        file: str,
        buttons: tuple[str, ...],
        combine: bool,
        skill: int | None,
        frame_skip: int,
        timeout: int | None,
        occlude: tuple[int, ...],
        occlude_colour: tuple[int, ...],
    ) -> None:
        self._frame_skip, self._occlude, self._occlude_colour = frame_skip, occlude, occlude_colour
        self._presses = presses(len(buttons), combine)
        self._has_goal = file in _WITH_GOAL
        self._game = game = vizdoom.DoomGame()
        self._process: int | None = None  # id of the game's process
        self._tics = 0  # in this episode
        self._load_scenario(Path(vizdoom.scenarios_path) / f"{file}.cfg")
        self._timeout = timeout or game.get_episode_timeout()
        self._screen: Frame = np.zeros(SCREEN, np.uint8)
        game.set_available_buttons([_button(name) for name in buttons])
        game.set_available_game_variables([])
        if skill is not None:
            game.set_doom_skill(skill)
        # ViZDoom's own time-out ends an episode without a last frame, so tics are counted here
        game.set_episode_timeout(0)
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        game.set_window_visible(False)
        game.set_mode(vizdoom.Mode.PLAYER)
        game.set_doom_config_path(f"game-{id(self)}.ini")  # ViZDoom writes its settings there
        # ViZDoom's processes would make this folder, and crash where several do so at the same time
        Path("_vizdoom").mkdir(exist_ok=True)
        if (launcher := _launcher()) is not None:
            game.set_vizdoom_path(str(launcher))

    def begin(self, seed: int | None, steps: int) -> Frame:
        game = self._game
        if seed is not None:
            game.set_seed(seed % 2**32)
        if game.is_running():
            game.new_episode()
        else:
            self._start()
        self._tics = 0
        return self._frame()

    def step(self, action: int) -> tuple[Frame, float, bool, bool]:
        tics = self._frame_skip
        if self._timeout:
            tics = min(tics, self._timeout - self._tics)
        reward = self._game.make_action(self._presses[action], tics)
        self._tics += tics
        terminated = self._game.is_episode_finished()
        truncated = not terminated and 0 < self._timeout <= self._tics
        if self._has_goal and (terminated or truncated):
            self.success = terminated and not self._game.is_player_dead()
        return self._screen if terminated else self._frame(), reward, terminated, truncated

    def picture(self) -> Frame:
        return self._screen

    def kill(self) -> bool:
        process = self._process or self._find_process()
        if process is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        return True

    def state(self) -> None:
        """None, because ViZDoom's saved games lack the state of its random number generator."""
        return None

    def load(self, state: dict[str, Any]) -> None:
        raise ValueError("a game of ViZDoom cannot be saved")

    def close(self) -> None:
        self._game.close()

    def _load_scenario(self, config: Path) -> None:
        if not config.is_file():
            raise Unusable(f"The scenario file {config} is missing from the package vizdoom. {_REINSTALL}")
        self._game.load_config(str(config))
        for path in (self._game.get_doom_scenario_path(), self._game.get_doom_game_path()):
            if path and not Path(path).is_file():  # an empty path means the package's own file
                raise Unusable(f"The file {path} is missing from the package vizdoom. {_REINSTALL}")

    def _start(self) -> None:
        game = self._game
        game.init()
        identifier, self._process = game.get_instance_id(), self._find_process()
        # Both processes have opened the shared memory by now. Its names are removed, so that nothing is left
        # over if the processes are killed.
        for name in _NAMES_OF_MEMORY:
            Path(f"/dev/shm/ViZDoom{name}{identifier}").unlink(missing_ok=True)

    def _find_process(self) -> int | None:
        """The id of this game's process, which has the game's identifier among its arguments."""
        identifier = self._game.get_instance_id()
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if identifier and identifier in child.cmdline():
                    return child.pid
        return None

    def _frame(self) -> Frame:
        """The screen as [3, 84, 84], reduced by averaging over areas, as DeepMind reduces Atari's."""
        screen = self._game.get_state().screen_buffer
        if screen.shape != SCREEN:
            raise ValueError(f"it gave a screen of {list(screen.shape)}")
        if self._occlude:
            left, right, top, bottom = self._occlude
            screen[top:bottom, left:right] = self._occlude_colour
        self._screen = screen
        small = cv2.resize(screen, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
        return np.asarray(small, np.uint8).transpose(2, 0, 1)


def _button(name: str) -> vizdoom.Button:
    try:
        return vizdoom.Button.__members__[name.replace("-", "_").upper()]
    except KeyError:
        known = ", ".join(b.lower().replace("_", "-") for b in vizdoom.Button.__members__)
        raise Unusable(f"ViZDoom has no button '{name}'. Use some of {known}.") from None


def _launcher() -> Path | None:
    """A script that starts the game's program, so that the kernel kills it when this process ends; None where
    the system has no ``setpriv``, or executes nothing in this folder (a mount option, ``noexec``)."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return None
    path = Path("vizdoom-until-parent-ends").absolute()
    if not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}-{id(path)}")
        command = shlex.join([setpriv, "--pdeathsig", "KILL", vizdoom.exe_path])
        temporary.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        temporary.chmod(temporary.stat().st_mode | stat.S_IXUSR)
        temporary.rename(path)
    return path if os.access(path, os.X_OK) else None
