"""Atari games, stepped by ale-py's own C++ vector environment with DeepMind's preprocessing.

Preprocessing (Mnih et al. 2015, "Methods: Preprocessing" and "Training details"): each action is
repeated for 4 frames, the last two are maximised pixel by pixel, turned grey, resized to 84 x 84, and
the last 4 results are stacked; a game begins with up to 30 no-ops. In training only, rewards are
clipped to [-1, 1] and the loss of a life ends the learner's episode while the game continues.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from murmurate import errors
from murmurate.ranges import NonNegativeInt, Range, StackLength, UnitInterval, check_ranges
from murmurate.spec import EnvSpec, TimeStep
from murmurate.worlds._numbers import check_actions
from murmurate.worlds.episodes import EpisodeCounter
from murmurate.worlds.generators import simulator_seed
from murmurate.worlds.interface import Picture, SimulatorWorld, first_step
from murmurate.worlds.occlusion import OccludedStacks, check_rectangle

_SCREEN = (210, 160)  # rows, columns
_SIDE = 84
_OCCLUDED = "-occluded"
# left, right, top, bottom and colour that Jin 2018 (section 2.5, "Atari") hides: the middle of Pong's field
_JINS_OCCLUSIONS = {"pong": ((55, 105, 34, 194), (144, 72, 17))}


def names() -> list[str]:
    """Every game, and the variants that Jin 2018 occludes; none without ale-py."""
    try:
        return [*games(), *(game + _OCCLUDED for game in _JINS_OCCLUSIONS)]
    except errors.MissingExtra:
        return []


def world(name: str) -> AtariWorld | None:
    """The game called ``name`` (with hyphens), or None. Raises ``MissingExtra`` without ale-py."""
    game = name.removesuffix(_OCCLUDED)
    if game not in games():
        return None
    if game == name:
        return AtariWorld(game.replace("-", "_"))
    if game not in _JINS_OCCLUSIONS:
        return None
    rectangle, colour = _JINS_OCCLUSIONS[game]
    return AtariWorld(game.replace("-", "_"), occlude=rectangle, occlude_colour=colour)


def games() -> list[str]:
    """Every game of the Arcade Learning Environment, named with hyphens. Raises ``MissingExtra``."""
    return sorted(game.replace("_", "-") for game in _roms().get_all_rom_ids())


@dataclass(frozen=True)
class AtariWorld(SimulatorWorld):
    """One Atari game under DeepMind's preprocessing. ``game`` is ALE's name: ``space_invaders``.

    frame_skip: frames of the emulator that an action lasts. stack: number of latest images in an observation.
    noop_max: largest random number of frames without an action at a game's beginning.
    sticky: probability that a frame repeats the action of the frame before (Machado et al. 2018, section 5.2,
        advise 0.25; DeepMind's protocol has 0).
    max_frames_per_episode: number of frames after which a game is truncated, not terminated (108,000 are 30
        minutes).
    clip_rewards: in training, clip rewards to -1, 0 and 1.
    life_loss: in training, a lost life ends an episode.
    fire_reset: press FIRE at a game's beginning, where the game has that action.
    occlude: left, right, top and bottom of a rectangle of the screen of 160 x 210 that is hidden: columns
        [left, right), rows [top, bottom); empty for none. occlude_colour: red, green, blue.
    """

    game: str = field(metadata={"in_name": True})
    frame_skip: Annotated[int, Range(1, 1000)] = 4
    stack: StackLength = 4
    noop_max: Annotated[int, Range(0, 1000)] = 30
    sticky: UnitInterval = 0.0
    max_frames_per_episode: Annotated[int, Range(1, 2**31 - 1)] = 108_000
    clip_rewards: bool = True
    life_loss: bool = True
    fire_reset: bool = True
    occlude: tuple[NonNegativeInt, ...] = field(default=(), metadata={"since": 3})
    occlude_colour: tuple[Annotated[int, Range(0, 255)], ...] = field(
        default=(0, 0, 0), metadata={"since": 3}
    )

    images: ClassVar[bool] = True
    begins_with_zeros: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ranges(self)
        check_rectangle(self.occlude, self.occlude_colour, _SCREEN[1], _SCREEN[0])

    @property
    def name(self) -> str:
        game = self.game.replace("_", "-")
        is_jins = (self.occlude, self.occlude_colour) == _JINS_OCCLUSIONS.get(game)
        return game + _OCCLUDED * is_jins

    @property
    def env_steps_per_second(self) -> float:
        return 60 / self.frame_skip

    def open(
        self, simulators: int, *, training: bool, threads: int = 1, first: int = 0, picture: bool = False
    ) -> AtariSimulators:
        return AtariSimulators(self, simulators, training, threads, first, picture)

    def vector(self, simulators: int, threads: int, life_loss: bool, **view: Any) -> Any:
        """ale-py's vector environment of this world. view: ale-py's options that replace those of the stack
        and of the size and colours of images."""
        if (game := self.game.replace("_", "-")) not in games():
            raise errors.unknown("game", game, games())
        from ale_py.vector_env import AtariVectorEnv

        settings: dict[str, Any] = {"stack_num": self.stack, **view}
        return AtariVectorEnv(
            self.game,
            simulators,
            num_threads=threads,
            frameskip=self.frame_skip,
            noop_max=self.noop_max,
            repeat_action_probability=self.sticky,
            max_num_frames_per_episode=self.max_frames_per_episode,
            use_fire_reset=self.fire_reset,
            # episodic_life would restart the whole game at each lost life; this only reports the loss
            life_loss_info=life_loss,
            # ``receive`` clips, because returns are summed from raw scores
            reward_clipping=False,
            autoreset_mode="SameStep",
            **settings,
        )


class AtariSimulators:
    """``B`` games of one ``AtariWorld``. Observations are [B, stack, 84, 84] uint8. If a rectangle is hidden,
    ale-py gives screens in full size (after the maximum over two frames), and ``OccludedStacks`` hides the
    rectangle, reduces the screens and stacks them.

    The games cannot be saved, because ale-py's vector environment does not expose its state.
    """

    def __init__(
        self, world: AtariWorld, size: int, training: bool, threads: int, first: int, picture: bool
    ) -> None:
        full_size = {"stack_num": 1, "img_height": _SCREEN[0], "img_width": _SCREEN[1]}
        self._env = world.vector(
            size, threads, life_loss=training and world.life_loss, **(full_size if world.occlude else {})
        )
        self._occluded = (
            OccludedStacks(size, world.stack, _SIDE, world.occlude, world.occlude_colour)
            if world.occlude
            else None
        )
        # The same games in colour and full size: equal seeds and actions give equal games.
        self._picture_env = (
            world.vector(size, threads, False, **full_size, grayscale=False) if picture else None
        )
        self._world = world
        self._clip = training and world.clip_rewards
        self._first = first
        self.size = size
        self._counter = EpisodeCounter(size)
        self._earlier_frames: npt.NDArray[np.int32] = np.zeros(size, np.int32)  # [B], of all earlier games
        self._picture: Picture | None = None
        self.spec = EnvSpec(
            stacked=True,
            name=world.name,
            observation_shape=(world.stack, _SIDE, _SIDE),
            observation_dtype=torch.uint8,
            actions=int(self._env.single_action_space.n),
            frames_per_step=world.frame_skip,
        )

    def reset(self, seed: int) -> TimeStep:
        # ALE stores seeds as int32, and a negative one means that none is given.
        seeds = np.array([simulator_seed(seed, self._first + b) % (2**31 - 2) + 1 for b in range(self.size)])
        observation, info = self._env.reset(seed=seeds)
        if self._picture_env is not None:
            self._picture = self._occluded_picture(self._picture_env.reset(seed=seeds)[0][0, 0])
        self._counter.clear()
        self._earlier_frames = info["frame_number"] - info["episode_frame_number"]
        if self._occluded is not None:
            observation = self._occluded.first(observation[:, 0])
        return first_step(torch.from_numpy(observation))

    def send(self, action: Tensor) -> None:
        chosen = action.numpy()
        # An invalid action would silently end ALE's worker thread, and ``receive`` would never return.
        check_actions(chosen, self.spec.actions, self.spec.name)
        self._env.send(chosen)
        if self._picture_env is not None:
            self._picture_env.send(chosen)

    def receive(self) -> TimeStep:
        observation, score, terminated, truncated, info = self._env.recv()
        if self._picture_env is not None:
            self._picture = self._occluded_picture(self._picture_env.recv()[0][0, 0])
        self._counter.tick(score)
        # The number of frames in earlier games changes exactly when a new game has begun. This cannot be seen
        # from `terminated` (life losses), `lives` (Pong has none) or a decrease of the frame number (a game
        # may be shorter than the next game's no-ops).
        earlier_frames = info["frame_number"] - info["episode_frame_number"]
        over = earlier_frames != self._earlier_frames
        self._earlier_frames = earlier_frames
        final = info["final_obs"] if truncated.any() else None
        if self._occluded is not None:
            final = None if final is None else self._occluded.shifted(final[:, 0])
            observation = self._occluded.next(observation[:, 0], over)
        return TimeStep(
            observation=torch.from_numpy(observation),
            reward=torch.from_numpy((np.clip(score, -1, 1) if self._clip else score).astype(np.float32)),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            final_observation=None if final is None else torch.from_numpy(final),
            episodes=self._counter.finish(over) if over.any() else (),
        )

    def state(self) -> dict[str, Any] | None:
        return None

    def load(self, state: dict[str, Any]) -> TimeStep:
        raise ValueError("Atari simulators cannot be saved, so there is no state to load: call reset")

    def picture(self) -> Picture:
        if self._picture is None:
            raise ValueError("no picture: open the world with picture=True, then reset")
        return self._picture

    def _occluded_picture(self, picture: Picture) -> Picture:
        if self._world.occlude:
            left, right, top, bottom = self._world.occlude
            picture[top:bottom, left:right] = self._world.occlude_colour
        return picture

    def close(self) -> None:
        # The C++ destructor joins the worker threads.
        self._env = self._picture_env = None


def _roms() -> Any:
    try:
        from ale_py import roms
    except ImportError as problem:
        raise errors.MissingExtra("ale-py", "atari", "Atari") from problem
    return roms
