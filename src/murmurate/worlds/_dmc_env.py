"""The DeepMind Control Suite (Tassa et al. 2018) as gymnasium environments. Imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from murmurate import errors
from murmurate.worlds.env_state import Unsavable, silence_mujoco
from murmurate.worlds.modules import import_triton

_LIBRARIES = "libegl1 libegl-mesa0 libgl1-mesa-dri"
# With these a picture of 84 x 84 is almost the suite's own, and is drawn several times faster without a GPU.
_SHADOW_TEXELS, _SAMPLES = 512, 0
SCREEN = (240, 320, 3)  # shape of a picture for people
# fields of MuJoCo's model that tasks set at random when an episode begins
_RANDOM_FIELDS = ("body_pos", "body_quat", "geom_pos", "site_pos", "light_pos", "wrap_prm", "hfield_data")


def is_installed() -> bool:
    return importlib.util.find_spec("dm_control") is not None


def suite(pictures: bool) -> ModuleType:
    """The module ``dm_control.suite``. pictures: whether it must be able to draw.

    It draws by EGL, on a GPU or by software, unless the environment variable MUJOCO_GL says otherwise.
    Raises ``MissingExtra`` without dm_control, and ``Refusal`` if it must draw and cannot.
    """
    if not is_installed():
        raise errors.MissingExtra("dm_control", "control", "The DeepMind Control Suite")
    renderer = os.environ.setdefault("MUJOCO_GL", "egl")
    import_triton()
    try:
        importlib.import_module("dm_control._render")
    except Exception as problem:  # the libraries that draw have no common type of error
        if pictures:
            raise cannot_draw(problem) from problem
        os.environ["MUJOCO_GL"] = "disabled"
        module = importlib.import_module("dm_control.suite")
        os.environ["MUJOCO_GL"] = renderer
        return module
    return importlib.import_module("dm_control.suite")


def cannot_draw(problem: Exception) -> errors.Refusal:
    renderer = os.environ.get("MUJOCO_GL", "egl")
    return errors.Refusal(
        f"MuJoCo cannot draw here by {renderer} ({type(problem).__name__}: {problem}). "
        f"On Debian and Ubuntu run: apt-get install {_LIBRARIES}. Or install libosmesa6 and set the "
        "environment variable MUJOCO_GL to osmesa."
    )


class DmcEnv(gymnasium.Env[Any, Any]):
    """Observations are the suite's, concatenated in float32, or [3, size, size] pictures in uint8.

    An action is repeated ``action_repeat`` times, or until the episode ends; the reward is the sum. The
    task's time limit truncates an episode. picture: whether ``render`` can be called. Raises ``Refusal`` for
    a camera that the task lacks, and if MuJoCo cannot draw.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(
        self, domain: str, task: str, pixels: bool, action_repeat: int, size: int, camera: int, picture: bool
    ) -> None:
        # some tasks use it while they are loaded; ``reset`` seeds it for the episodes
        self._random = np.random.RandomState(0)
        module = suite(pixels or picture)
        with silence_mujoco("mujoco"):
            self.env = module.load(domain, task, task_kwargs={"random": self._random})
        self.physics = self.env.physics
        self._repeat, self._size, self._camera, self._pixels = action_repeat, size, camera, pixels
        self.render_mode = "rgb_array" if picture else None
        self._cameras: dict[tuple[int, int], Any] = {}  # by height and width
        # must be set here: the renderer reads these once, before the first picture
        model = self.physics.model
        quality, framebuffer = model.vis.quality, model.vis.global_
        quality.shadowsize, quality.offsamples = _SHADOW_TEXELS, _SAMPLES
        framebuffer.offwidth = max(framebuffer.offwidth, size)
        framebuffer.offheight = max(framebuffer.offheight, size)
        if pixels or picture:
            if camera >= model.ncam:
                raise errors.Refusal(
                    f"The task {task} of {domain} has no camera {camera}. "
                    f"Choose with --world.camera from 0 to {model.ncam - 1}."
                )
            try:
                self._draw(size, size)
            except Exception as problem:  # the libraries that draw have no common type of error
                raise cannot_draw(problem) from problem
        bounds = self.env.action_spec()
        self.action_space = gymnasium.spaces.Box(
            np.broadcast_to(bounds.minimum, bounds.shape).astype(np.float32),
            np.broadcast_to(bounds.maximum, bounds.shape).astype(np.float32),
        )
        if pixels:
            self.observation_space = gymnasium.spaces.Box(0, 255, (3, size, size), np.uint8)
        else:
            numbers = sum(int(np.prod(spec.shape)) for spec in self.env.observation_spec().values())
            self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (numbers,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[npt.NDArray[Any], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            seeded = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
            self._random.set_state(seeded.get_state())
        return self._observation(self.env.reset()), {}

    def step(self, action: Any) -> tuple[npt.NDArray[Any], float, bool, bool, dict[str, Any]]:
        reward = 0.0
        for _ in range(self._repeat):
            step = self.env.step(action)
            reward += step.reward
            if step.last():
                break
        over = step.last()
        return self._observation(step), reward, over and step.discount == 0, over and step.discount != 0, {}

    def render(self) -> npt.NDArray[np.uint8]:
        return self._draw(*SCREEN[:2]).copy()

    def close(self) -> None:
        self._cameras.clear()
        self.env.close()

    def saver(self) -> DmcSaver:
        return DmcSaver(self)

    def _observation(self, step: Any) -> npt.NDArray[Any]:
        if self._pixels:
            return self._draw(self._size, self._size).transpose(2, 0, 1).copy()
        return np.concatenate([np.ravel(value) for value in step.observation.values()]).astype(np.float32)

    def _draw(self, height: int, width: int) -> npt.NDArray[np.uint8]:
        """A picture, which the next one of this size overwrites."""
        camera = self._cameras.get((height, width))
        if camera is None:
            # ``physics.render`` makes one for each picture, which takes a third of its time
            make_camera = importlib.import_module("dm_control.mujoco").Camera
            camera = self._cameras[height, width] = make_camera(self.physics, height, width, self._camera)
        image: npt.NDArray[np.uint8] = camera.render()
        return image


class DmcSaver:
    """Saves MuJoCo's integration state, from which the other quantities are computed, the fields of the model
    that were set at random when the episode began, and the task's generator."""

    def __init__(self, env: DmcEnv) -> None:
        self._env = env
        self._mujoco = importlib.import_module("mujoco")

    def save(self) -> dict[str, Any]:
        """The present state. Raises ``Unsavable`` for pictures of a height field, of which the renderer keeps
        its own copy."""
        env, physics = self._env, self._env.physics
        if env._pixels and physics.model.nhfield:
            raise Unsavable("the height field of a picture")
        fields = {name: np.array(getattr(physics.model, name)) for name in _RANDOM_FIELDS}
        generator = env._random.get_state(legacy=False)
        return {
            "integration": physics.get_state(sig=self._signature),
            "model": {name: value for name, value in fields.items() if value.size},
            "steps": env.env._step_count,
            "generator": {
                **generator["state"],
                "gauss": generator["gauss"],
                "has_gauss": generator["has_gauss"],
            },
        }

    def load(self, state: dict[str, Any]) -> None:
        env, physics = self._env, self._env.physics
        for name, value in state["model"].items():
            getattr(physics.model, name)[...] = value
        physics.set_state(state["integration"], sig=self._signature)
        # a step of dm_control ends with mj_step1, and the next one begins with mj_step2, which needs the
        # results of mj_step1
        self._mujoco.mj_step1(physics.model.ptr, physics.data.ptr)
        env.env._step_count, env.env._reset_next_step = state["steps"], False
        saved = dict(state["generator"])
        gauss = {name: saved.pop(name) for name in ("gauss", "has_gauss")}
        env._random.set_state({"bit_generator": "MT19937", "state": saved, **gauss})

    @property
    def _signature(self) -> int:
        """MuJoCo's number of the parts of its state that make up the integration state."""
        return int(self._mujoco.mjtState.mjSTATE_INTEGRATION)


def make(max_episode_steps: int | None, **options: Any) -> Any:
    """A ``DmcEnv``, with a time limit around it if one is given."""
    env = DmcEnv(**options)
    return env if max_episode_steps is None else gymnasium.wrappers.TimeLimit(env, max_episode_steps)
