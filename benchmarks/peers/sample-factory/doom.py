"""Sample Factory on MyWayHome as murmurate plays it: ``python doom.py MODE SIMULATORS FILE``.

MODE: ``async``, processes that sample while others learn (Sample Factory's default), or ``serial``, all in
one process. The same observations (160 x 120 RGB reduced to 84 x 84 by averaging over areas, every 4th tic,
4 of them stacked), the same 8 actions, and the same net (16 filters 8x8/4, 32 filters 4x4/2, 256 units). Each
sample is used once, inputs and returns are not normalised, and a process has one torch thread, as with
murmurate's A2C. Appends lines with ``env_steps`` to FILE.

It is a file because the processes that Sample Factory spawns import it again.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import cv2
import gymnasium
import numpy as np
import vizdoom
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

LINE_SECONDS = 0.5
BUTTONS = ("TURN_LEFT", "TURN_RIGHT", "MOVE_FORWARD")
SKIP, STACK, TIMEOUT = 4, 4, 2100
SETTINGS = {
    "algo": "APPO",
    "env": "my_way_home",
    "experiment": "bench",
    "device": "cpu",
    "num_epochs": 1,
    "num_batches_per_epoch": 1,
    "rollout": 32,
    "batch_size": 512,
    "use_rnn": False,
    "nonlinearity": "relu",
    "encoder_conv_architecture": "convnet_impala",
    "encoder_conv_mlp_layers": 256,
    "normalize_input": False,
    "normalize_returns": False,
    "obs_scale": 255.0,
    "obs_subtract_mean": 0.0,
    "env_frameskip": 1,  # the environment skips by itself, and env steps are counted
    "summaries_use_frameskip": False,
    "decorrelate_envs_on_one_worker": False,
    "decorrelate_experience_max_seconds": 0,
    "train_for_seconds": 3600,
    "save_every_sec": 3600,
    "log_to_file": False,
}


class MyWayHome(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (3 * STACK, 84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(2 ** len(BUTTONS))
    render_mode = None

    def __init__(self) -> None:
        self._game = game = vizdoom.DoomGame()
        game.load_config(os.path.join(vizdoom.scenarios_path, "my_way_home.cfg"))
        game.set_available_buttons([vizdoom.Button.__members__[name] for name in BUTTONS])
        game.set_available_game_variables([])
        game.set_episode_timeout(0)
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        game.set_window_visible(False)
        self._frames: deque[np.ndarray] = deque(maxlen=STACK)
        self._held = [[bool(a >> k & 1) for k in range(len(BUTTONS))] for a in range(2 ** len(BUTTONS))]
        self._tics = 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._game.set_seed(seed)
        if self._game.is_running():
            self._game.new_episode()
        else:
            self._game.init()
            for name in ("SM", "MQCtr", "MQDoom"):  # nothing is left of them where the benchmark kills this
                Path(f"/dev/shm/ViZDoom{name}{self._game.get_instance_id()}").unlink(missing_ok=True)
        self._tics = 0
        frame = self._frame()
        self._frames.extend([frame] * STACK)
        return np.concatenate(self._frames), {}

    def step(self, action):
        reward = self._game.make_action(self._held[int(action)], SKIP)
        self._tics += SKIP
        terminated = self._game.is_episode_finished()
        if not terminated:
            self._frames.append(self._frame())
        return np.concatenate(self._frames), reward, terminated, self._tics >= TIMEOUT and not terminated, {}

    def close(self):
        self._game.close()

    def _frame(self) -> np.ndarray:
        screen = self._game.get_state().screen_buffer
        return cv2.resize(screen, (84, 84), interpolation=cv2.INTER_AREA).transpose(2, 0, 1)


def make_environment(full_env_name, cfg=None, env_config=None, render_mode=None):
    cv2.setNumThreads(1)
    return MyWayHome()


class Progress(AlgoObserver):
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115
        self._written_at = 0.0
        self._bench = os.getppid()

    def on_training_step(self, runner, training_iteration_since_resume) -> None:
        steps, now = runner.total_env_steps_since_resume, time.monotonic()
        if steps and now - self._written_at > LINE_SECONDS:
            self._written_at = now
            self._file.write(json.dumps({"env_steps": steps}) + "\n")
        if os.getppid() != self._bench:  # the benchmark has ended
            os._exit(1)


def main(mode: str, simulators: int, path: Path) -> None:
    register_env("my_way_home", make_environment)
    workers = 1 if mode == "serial" else 2
    settings = SETTINGS | {
        "train_dir": tempfile.mkdtemp(),
        "num_workers": workers,
        "num_envs_per_worker": simulators // workers,
        "worker_num_splits": 1 if mode == "serial" else 2,
        "serial_mode": mode == "serial",
        "async_rl": mode != "serial",
    }
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    parser, _ = parse_sf_args(arguments)
    _, runner = make_runner(parse_full_cfg(parser, arguments))
    runner.register_observer(Progress(path))
    runner.init()
    runner.run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).absolute())
