"""Makes gymnasium's environments by their ids.

Imports no torch, so that the game server (``_game_server.py``) can use it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from murmurate import errors
from murmurate.worlds._failures import noted
from murmurate.worlds.env_state import seed_spaces, silence_mujoco
from murmurate.worlds.modules import draw_without_screen, import_module, import_triton

PREFIX = "gym:"
SHORT_SEEDS = 2**31  # number of the seeds that every generator takes
REFUSALS_OF_SEEDS = (ValueError, TypeError, OverflowError)
# modules whose environments draw by SDL, so that Mesa is not loaded (see ``import_triton``)
_WITHOUT_MESA = ("gymnasium.envs.classic_control", "gymnasium.envs.toy_text", "ale_py")


def registered(ident: str, folder: str = "") -> Any:
    """Gymnasium's spec of an id. folder: see ``modules.import_module``.

    Raises ``Refusal`` if it is not registered, or if its module cannot be imported.
    """
    module, _, name = ident.rpartition(":")
    if module:
        import_triton()
        import_module(module, folder, f"The world {PREFIX}{ident}")
    try:
        spec = gymnasium.spec(name)
    except gymnasium.error.Error as problem:
        hint = errors.did_you_mean(name, gymnasium.registry)
        raise errors.Refusal(
            f"No Gymnasium environment is registered as '{name}'.{hint} Name the module that registers it "
            f"too, as in {PREFIX}my_module:{name}."
        ) from problem
    if not str(spec.entry_point).startswith(_WITHOUT_MESA):
        import_triton()
    return spec


def _render_options(picture: bool) -> dict[str, Any]:
    if not picture:
        return {}
    draw_without_screen()
    return {"render_mode": "rgb_array"}


def make(
    ident: str, name: str, max_episode_steps: int | None = None, picture: bool = False, folder: str = ""
) -> Any:
    """The environment with all its wrappers. name: name of the world, for messages.

    Raises ``Refusal`` if it cannot be opened, ``MissingExtra`` if it needs MuJoCo and that is not installed.
    """
    spec = registered(ident, folder)
    kwargs = _render_options(picture)
    no_pictures = f"{name} has no pictures: its constructor must take render_mode='rgb_array'."
    try:
        with silence_mujoco(spec.entry_point):
            made = gymnasium.make(
                spec, max_episode_steps=max_episode_steps, disable_env_checker=True, **kwargs
            )
    except gymnasium.error.DependencyNotInstalled as problem:
        if "mujoco" in str(problem).lower():
            raise errors.MissingExtra("mujoco", "mujoco", f"The world {name}") from problem
        raise errors.Refusal(f"The world {name} cannot be opened: {problem}") from problem
    except errors.Refusal:
        raise
    except Exception as problem:
        if picture and isinstance(problem, TypeError):
            raise errors.Refusal(f"{no_pictures} ({problem})") from problem
        raise _unusable(name, problem) from problem
    if picture and made.render_mode != "rgb_array":
        raise errors.Refusal(no_pictures)
    return made


def without_checks(made: Any) -> tuple[Any, int]:
    """(the environment without wrappers, its time limit) if its only wrappers are gymnasium's checks and time
    limits; else (``made``, a limit that is never reached): ``made`` then keeps its own time limit."""
    inner, limit = made, sys.maxsize
    while type(inner) in (OrderEnforcing, PassiveEnvChecker, TimeLimit):
        if type(inner) is TimeLimit:
            limit = min(limit, inner._max_episode_steps)
        inner = inner.env
    return (made, sys.maxsize) if isinstance(inner, gymnasium.Wrapper) else (inner, limit)


def reset(env: Any, seed: int | None) -> Any:
    """The first observation of an episode. seed: for its generator and those of its spaces; None: go on.

    NumPy's older generators, which an environment may use, take seeds of 32 bits only. An environment that
    refuses a larger one gets its remainder.
    """
    if seed is not None:
        seed_spaces(env, seed)
    try:
        given = env.reset(seed=seed)
    except REFUSALS_OF_SEEDS:
        if seed is None or seed < SHORT_SEEDS:
            raise
        given = env.reset(seed=seed % SHORT_SEEDS)
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        kind = type(given).__name__
        raise ValueError(f"what it returned is of type {kind}, and it must return (observation, info)")
    return given[0]


def close(env: Any) -> None:
    """Close an environment that is no longer needed. An exception is noted, and ends no run."""
    try:
        env.close()
    except Exception as problem:
        noted(problem)


def success_of(info: Any) -> bool | None:
    """Whether the episode that ends with this info was a success; None where the environment does not say.

    Raises ``ValueError`` for anything but a mapping in which success is one value.
    """
    if not isinstance(info, Mapping):
        raise ValueError(f"its info is {info!r}: step must return a dict")
    success = info.get("success", info.get("is_success"))
    if success is None:
        return None
    if np.size(success) != 1:
        raise ValueError(f"success in its info is {success!r}: it must be one truth value")
    return bool(success)


def running_statistics(env: Any) -> tuple[str, ...]:
    """The names of gymnasium's wrappers around ``env`` that normalise by running statistics, outermost
    first; those whose statistics are fixed are left out."""
    found = []
    while True:
        name = type(env).__name__  # those of vector environments have the same names
        if name in ("NormalizeObservation", "NormalizeReward") and getattr(env, "update_running_mean", True):
            found.append(name)
        if isinstance(env, (gymnasium.Wrapper, gymnasium.vector.VectorWrapper)):
            env = env.env
        elif isinstance(env, gymnasium.vector.SyncVectorEnv):
            env = env.envs[0]
        else:
            return tuple(found)


def make_vector(
    ident: str, size: int, mode: str, max_episode_steps: int | None, picture: bool, folder: str
) -> Any:
    """Gymnasium's vector environment of an id. mode: ``async`` or ``vector_entry_point``. Raises ``Refusal``
    if it cannot be opened."""
    spec = registered(ident, folder)
    settings = _render_options(picture)
    if max_episode_steps is not None:
        settings["max_episode_steps"] = max_episode_steps
    if mode == "async":
        settings["vector_kwargs"] = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    try:
        return gymnasium.make_vec(spec, size, vectorization_mode=mode, **settings)
    except errors.Refusal:
        raise
    except Exception as problem:
        raise _unusable(f"{PREFIX}{ident}", problem) from problem


def _unusable(name: str, problem: Exception) -> errors.Refusal:
    """The exception for an environment whose constructor raised ``problem``, or cannot be imported."""
    place = "" if isinstance(problem, ImportError) else noted(problem)
    return errors.Refusal(
        f"The world {name} cannot be opened: {type(problem).__name__}{place}: {problem}"
        f"{errors.library_advice(problem)}"
    )


def frame_rate(env: Any, usual: float) -> float:
    """The frames a second at which an environment says that it is shown, or ``usual``. Closes it."""
    close(env)
    return float(env.metadata.get("render_fps") or usual)
