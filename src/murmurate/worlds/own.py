"""Environments of your own: ``env:my_module:make_env`` or ``env:path/to/file.py:make_env``, a class or a
function that makes a gymnasium environment, with any wrappers.

If it has a parameter ``num_envs``, it must return a ``gymnasium.vector.VectorEnv`` of that many environments
instead. If it has a parameter ``training``, it is true in training and false in evaluations and for pictures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from murmurate import plugins
from murmurate.errors import Refusal
from murmurate.ranges import NonNegativeInt, PositiveInt, StackLength, check_ranges
from murmurate.spec import World
from murmurate.worlds import _gym_env, _own_env, modules
from murmurate.worlds._formats import formats_of, spaces_of
from murmurate.worlds._own_env import PREFIX
from murmurate.worlds._spaces import JOINT_ACTIONS, holds_image
from murmurate.worlds.gym_simulators import GymSimulators
from murmurate.worlds.interface import Formats, Simulators, SimulatorWorld
from murmurate.worlds.served import served_environments
from murmurate.worlds.vector_simulators import VectorSimulators
from murmurate.worlds.viewed import ViewedWorld

_replacements: list[Callable[..., Any]] = []  # of the enclosing ``replaced_by`` contexts, the innermost last


def names() -> list[str]:
    """No names to list: the name of an environment of your own says where it is found."""
    return []


def world(name: str) -> OwnWorld | None:
    """The world called ``env:module:callable`` or ``env:FILE.py:callable``; None for other names.

    Raises ``Refusal`` where there is no such class or function, or its module or file cannot be imported.
    """
    if not name.startswith(PREFIX):
        return None
    target = plugins.absolute(name.removeprefix(PREFIX))
    if _replacements:
        _own_env.provide(target, _replacements[-1])
    if ":" not in target:
        raise Refusal(
            f"'{name}' names no class or function. Write {PREFIX}module:callable or {PREFIX}FILE.py:callable."
        )
    _, folder = _own_env.find_callable(target, "", PREFIX + target)
    return OwnWorld(target, folder=folder)


def absolute_name(name: str) -> str:
    """``name`` of any world, with the path of a file in it made absolute."""
    if not name.startswith(PREFIX):
        return name
    return PREFIX + plugins.absolute(name.removeprefix(PREFIX))


def world_name(env: str) -> str:
    """The name of the world that ``env`` means: a registered id, ``module:Id``, ``module:callable``,
    ``FILE.py:callable``, or already the name of a world.

    Raises ``Refusal`` for a file without ``:NAME``, and for a module that cannot be imported, or that neither
    has such a callable nor registers such an id.
    """
    module_name, _, path = env.rpartition(":")
    if env.startswith((PREFIX, _gym_env.PREFIX)):
        return absolute_name(env)
    if module_name.endswith(".py"):
        return absolute_name(PREFIX + env)
    if env.endswith(".py"):
        raise Refusal(
            f"'{env}' is a file. Name the class or function in it that makes the environment: {env}:NAME"
        )
    if not module_name:
        return _gym_env.PREFIX + env if env in gymnasium.registry else env
    module, _ = modules.import_module(module_name, "", f"The environment {env}")
    if callable(modules.attribute_at(module, path)):
        return PREFIX + env
    if path not in gymnasium.registry:
        near = difflib.get_close_matches(path, [*vars(module), *gymnasium.registry], n=1, cutoff=0.6)
        hint = f" Did you mean '{module_name}:{near[0]}'?" if near else ""
        raise Refusal(
            f"The module '{module_name}' has no class or function '{path}' and registers no environment of "
            f"that name.{hint}"
        )
    return _gym_env.PREFIX + env


def world_of(env: str | Callable[..., Any]) -> SimulatorWorld:
    """The world of an environment of your own.

    Args:
        env: a class or function that returns a ``gymnasium.Env`` (or, given ``num_envs``, a
            ``gymnasium.vector.VectorEnv``), and may take ``training`` and ``render_mode``; or a name as
            ``world_name`` reads it. A callable that other processes cannot import by name (a lambda, a nested
            function, an object) makes a world for this process alone: for the launcher ``inline``.

    Raises:
        Refusal: for a name that refers to nothing, and for an ``env`` that is neither a name nor callable;
            also where the file or module of an environment, while it is loaded, calls this to start a run.
        MissingExtra: for a name that may be of a world of a package that is not installed.
    """
    from murmurate.worlds import registry

    if source := modules.being_loaded():
        raise Refusal(
            f"{source} starts a run while it is loaded for the environment in it. Put what starts the run "
            'under: if __name__ == "__main__":'
        )
    if isinstance(env, str):
        return registry.world(world_name(env))
    if not callable(env):
        raise Refusal(
            f"env is of type {type(env).__name__}, and every simulator needs an environment of its own. Pass "
            "a class or function that makes one, or its name."
        )
    target, folder = _own_env.target_of(env)
    return OwnWorld(target, folder=folder)


@contextlib.contextmanager
def replaced_by(env: str | Callable[..., Any] | None) -> Iterator[OwnWorld | None]:
    """For a run folder whose own class or function cannot be found here: within this context, ``env`` makes
    the environments of every world that ``world`` returns. Yields the world of ``env``, for ``relocated``,
    whose result may be used after the context too. With None it changes nothing, and yields None.

    Raises ``Refusal`` for a name that refers to nothing, or to a registered environment.
    """
    if env is None:
        yield None
        return
    if isinstance(env, str):
        replacement = world(world_of(env).name)
        if replacement is None:
            raise Refusal(f"'{env}' names no class or function. Write module:callable or FILE.py:callable.")
        env, _ = _own_env.find_callable(replacement.target, replacement.folder, replacement.name)
    else:
        target, folder = _own_env.target_of(env)
        replacement = OwnWorld(target, folder=folder)
    _replacements.append(env)
    try:
        with _own_env.restored():  # other runs of this process name the same class or function
            yield replacement
    finally:
        _replacements.pop()


def relocated(world: World, replacement: OwnWorld) -> World:
    """``world`` with its own settings, and with the class or function of ``replacement``.

    Raises ``Refusal`` if ``world`` is not one of the user's own environments.
    """
    if not world.name.startswith(PREFIX):
        raise Refusal(
            f"The environment {world.name} was not made by a class or function of yours: leave out --env "
            "(in Python: env)."
        )
    config: Any = world
    moved: World = dataclasses.replace(config, target=replacement.target, folder=replacement.folder)
    return moved


@dataclass(frozen=True)
class OwnWorld(ViewedWorld):
    """Environments that a user's own class or function makes, with their wrappers.

    target: ``module:NAME``, or ``FILE.py:NAME`` with an absolute path.
    folder: where the module was found, if it is not installed.
    max_episode_steps: steps after which an episode is truncated, unless the environment's own limit is lower.
    observe: keys of a Dict that are observed (``outer.inner`` in a nested one); empty for all.
    frame_stack: number of latest observations that the agent sees as one.
    rescale_actions: the agent's vector actions are from -1 to 1, and are scaled to the environment's bounds.
    joint_actions: a MultiDiscrete or MultiBinary action is one number if there are at most this many
        combinations; otherwise its parts are chosen independently, which a2c, ppo, trpo and impala can do.
    served: simulators run in a separate process, where one that hangs is detected too.
    """

    target: str = field(metadata={"in_name": True})
    folder: str = field(default="", metadata={"in_name": True, "since": 6})
    max_episode_steps: PositiveInt | None = None
    observe: tuple[str, ...] = ()
    frame_stack: StackLength = 1
    rescale_actions: bool = False
    joint_actions: NonNegativeInt = JOINT_ACTIONS
    served: bool = False

    def __post_init__(self) -> None:
        check_ranges(self)

    def __getstate__(self) -> dict[str, Any]:
        if (why := self.bound_to_process()) is not None:
            raise Refusal(f"{why} Or use a source without actor processes.")
        return self.__dict__

    @property
    def name(self) -> str:
        return PREFIX + self.target

    @functools.cached_property
    def images(self) -> bool:
        """Also true for a Dict that holds an image among what is observed."""
        function, _ = _own_env.find_callable(self.target, self.folder, self.name)
        if self.observe or _own_env.has_parameter(function, "num_envs"):
            return self.spec().holds_images
        env = _own_env.make(self.target, self.folder, self.name)
        _gym_env.close(env)
        return holds_image(env.observation_space)

    @property
    def env_steps_per_second(self) -> float:
        function, _ = _own_env.find_callable(self.target, self.folder, self.name)
        if _own_env.has_parameter(function, "num_envs"):
            return super().env_steps_per_second
        env = _own_env.make(self.target, self.folder, self.name)
        return _gym_env.frame_rate(env, super().env_steps_per_second)

    def bound_to_process(self) -> str | None:
        """See ``World.bound_to_process``."""
        if not self.target.startswith(_own_env.UNNAMED):
            return None
        return (
            f"The environment {self.target.removeprefix(_own_env.UNNAMED)} is a lambda, a nested function, "
            "an object, of a notebook, or not what its __qualname__ refers to, which other processes cannot "
            "make. Put a function at the top level of a module or script, or use the launcher inline, "
            "without served."
        )

    def is_tried(self) -> bool:
        return not self.served

    def formats(self) -> Formats:
        function, _ = _own_env.find_callable(self.target, self.folder, self.name)
        if _own_env.has_parameter(function, "num_envs"):
            env = _own_env.call(function, self.name, False, num_envs=1)
        else:
            env = _own_env.make(self.target, self.folder, self.name)
        return formats_of(
            *spaces_of(env),
            self.name,
            observe=self.observe,
            joint_actions=self.joint_actions,
            rescale_actions=self.rescale_actions,
        )

    def _open(self, simulators: int, training: bool, first: int, picture: bool) -> Simulators:
        space_options: dict[str, Any] = {"observe": self.observe, "joint_actions": self.joint_actions}
        options: dict[str, Any] = {"target": self.target, "folder": self.folder, "name": self.name}
        function, _ = _own_env.find_callable(**options)
        if _own_env.has_parameter(function, "num_envs"):
            self._check_vector()

            def make_vector() -> Any:
                return _own_env.call(function, self.name, picture, training, num_envs=simulators)

            return VectorSimulators(self.name, make_vector, simulators, first, **space_options)
        options |= {"max_episode_steps": self.max_episode_steps, "training": training}
        if self.served and not picture:
            if (why := self.bound_to_process()) is not None:
                raise Refusal(f"served is true. {why}")
            spec = self._served_spec()
            make_served = "murmurate.worlds._own_env:make"
            return served_environments(spec, make_served, options, simulators, first, **space_options)

        def make(b: int) -> tuple[Any, int]:
            return _own_env.make_without_checks(**options, picture=picture and b == 0)

        return GymSimulators(self.name, make, simulators, first, **space_options)

    def _check_vector(self) -> None:
        """Raise ``Refusal`` if an option is set that has no meaning for a vector environment."""
        for option in ("max_episode_steps", "served"):
            if getattr(self, option):
                raise Refusal(
                    f"--world.{option.replace('_', '-')} (world={{'{option}': ...}} in Python) is for "
                    f"environments made one by one, and {self.name} makes several at once. Leave it out, or "
                    "set it within the function."
                )
