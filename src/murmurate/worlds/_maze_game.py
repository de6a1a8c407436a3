"""One game of the maze curriculum, in miniworld, for the game server. Imports no torch.

Lengths are in metres; one metre stands for one block of Minecraft: obstacles of thickness 1 separate rooms of
7 x 7, as in Matiisen et al. 2017. A frame lasts as long as a tick of Minecraft, 1/20 s.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
from typing import Any

import numpy as np
import pyglet

from murmurate.worlds._game_server import Frame, Unusable

_PACKAGES = "libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libglu1-mesa"


def _no_opengl(problem: Exception) -> Unusable:
    return Unusable(
        f"OpenGL draws nothing here ({type(problem).__name__}: {problem}). On Debian and Ubuntu run: "
        f"apt-get install {_PACKAGES}"
    )


pyglet.options["headless"] = True  # must be set before OpenGL is imported
try:
    from miniworld.entity import Box, Entity
    from miniworld.math import intersect_circle_segs
    from miniworld.miniworld import MiniWorldEnv, Room
    from miniworld.opengl import Texture
    from miniworld.utils import get_file_path
    from pyglet import gl
except Exception as problem:  # the import opens a window; pyglet's errors have no common type
    raise _no_opengl(problem) from problem

SIDE = 84  # pixels of a frame, in each direction
SCREEN = (240, 320, 3)  # shape of a picture
TICKS_PER_SECOND = 20
# rewards: of gold; of lava, or a time-out on levels 1 to 4; of every action
GOAL, DEATH, COMMAND = 1000.0, -1000.0, -1.0
_SPEED, _TURN = 4.317, math.pi  # m/s, as a player of Minecraft walks; rad/s, as in Matiisen et al.
_ROOM, _WALL = 7.0, 1.0
_GAP, _BRIDGE = 1.5, 1.5  # width of an opening, and of a bridge
_TOUCH = 0.25  # greatest distance between the agent's circle and the gold block at which they touch
_ASPECT = SCREEN[1] / SCREEN[0]
# ``concrete_tiles`` is for ceilings: no room has one, but miniworld loads its texture
_TEXTURES = ("brick_wall", "cinder_blocks", "lava", "wood_planks", "concrete_tiles")
_LAYOUTS = {2: ("bridge",), 3: ("gap",), 4: ("bridge", "gap")}  # obstacles of a corridor
_WALL_TEXTURE, _FLOOR_TEXTURE, _LAVA_TEXTURE, _BRIDGE_TEXTURE = _TEXTURES[:4]
Rectangle = tuple[float, float, float, float]  # least x, greatest x, least z, greatest z


def _load_textures() -> None:
    """Load the textures into miniworld's cache, because miniworld's own loading takes seconds for each."""
    for name in _TEXTURES:
        path = get_file_path("textures", f"{name}_1", "png")
        if path not in Texture.tex_cache:
            texture = pyglet.image.load(path).get_texture()
            gl.glBindTexture(texture.target, texture.id)
            gl.glGenerateMipmap(gl.GL_TEXTURE_2D)
            gl.glTexParameteri(gl.GL_TEXTURE_2D, gl.GL_TEXTURE_MAG_FILTER, gl.GL_LINEAR)
            gl.glTexParameteri(gl.GL_TEXTURE_2D, gl.GL_TEXTURE_MIN_FILTER, gl.GL_LINEAR_MIPMAP_LINEAR)
            Texture.tex_cache[path] = Texture(texture, name)


class _Floor(Entity):  # type: ignore[misc]
    """A rectangle on the floor with its own texture. Nothing collides with it."""

    def __init__(self, texture: str, where: Rectangle, height: float) -> None:
        super().__init__()
        self.texture, self.where, self.height_above = Texture.get(texture), where, height
        self.pos, self.dir, self.radius = np.zeros(3), 0.0, -math.inf

    @property
    def is_static(self) -> bool:
        return True

    def contains(self, x: float, z: float) -> bool:
        low_x, high_x, low_z, high_z = self.where
        return low_x <= x <= high_x and low_z <= z <= high_z

    def render(self) -> None:
        low_x, high_x, low_z, high_z = self.where
        gl.glEnable(gl.GL_TEXTURE_2D)
        gl.glColor3f(1, 1, 1)
        self.texture.bind()
        gl.glBegin(gl.GL_QUADS)
        gl.glNormal3f(0, 1, 0)
        for x, z in ((low_x, high_z), (high_x, high_z), (high_x, low_z), (low_x, low_z)):
            gl.glTexCoord2f(x, z)
            gl.glVertex3f(x, self.height_above, z)
        gl.glEnd()


class _Gold(Box):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(color="yellow", size=1.0)

    def randomize(self, params: Any, generator: Any) -> None:
        self.color_vec = np.array([1.0, 0.78, 0.1])

    @property
    def is_static(self) -> bool:
        return True


class _Maze(MiniWorldEnv):  # type: ignore[misc]
    """The world of one level; ``level`` is set before ``reset``."""

    level = 1

    def __init__(self, picture: bool) -> None:
        # OpenGL's number of the display list of all that does not move; each game has its own list, whereas
        # miniworld uses one list for all games
        self._display_list = 0
        height, width = SCREEN[:2] if picture else (16, 16)
        super().__init__(obs_width=SIDE, obs_height=SIDE, window_width=width, window_height=height)

    def reset(self, **options: Any) -> tuple[Frame, dict[str, Any]]:
        self.shadow_window.switch_to()
        _load_textures()  # before the display list is recorded, which cannot include loading
        return super().reset(**options)  # type: ignore[no-any-return]

    # -- layout ---------------------------------------------------------------------------------------

    def _gen_world(self) -> None:
        self.lava: list[_Floor] = []
        self.bridges: list[_Floor] = []
        rooms = self._square() if self.level == 5 else self._corridor(_LAYOUTS.get(self.level, ()))
        self.gold = self.place_entity(_Gold(), room=rooms[-1])
        self.place_agent(room=rooms[0])
        while self.touches_gold:
            self.entities.remove(self.agent)
            self.place_agent(room=rooms[0])

    def _corridor(self, obstacles: tuple[str, ...]) -> list[Room]:
        """Make rooms in a row, with ``obstacles`` between them in random order."""
        rooms = [self._room(0, row) for row in range(len(obstacles) + 1)]
        for k, index in enumerate(self.np_random.permutation(len(obstacles))):
            self._join(rooms[k], rooms[k + 1], obstacles[index])
        return rooms

    def _square(self) -> list[Room]:
        """Make 2 x 2 rooms on a path through all four, with a random obstacle between consecutive rooms.
        Returns them in the order of the path."""
        ring = [(0, 0), (1, 0), (1, 1), (0, 1)]
        start, direction = int(self.np_random.integers(4)), 1 if self.np_random.integers(2) else -1
        rooms = [self._room(*ring[(start + direction * k) % 4]) for k in range(4)]
        for before, after in itertools.pairwise(rooms):
            self._join(before, after, "bridge" if self.np_random.integers(2) else "gap")
        return rooms

    def _room(self, column: int, row: int) -> Room:
        x, z = column * (_ROOM + _WALL), row * (_ROOM + _WALL)
        return self.add_rect_room(
            min_x=x,
            max_x=x + _ROOM,
            min_z=z,
            max_z=z + _ROOM,
            wall_tex=_WALL_TEXTURE,
            floor_tex=_FLOOR_TEXTURE,
            no_ceiling=True,
        )

    def _join(self, one: Room, other: Room, obstacle: str) -> None:
        """Join two adjacent rooms, at a random place: by an opening in the wall between them, or by a bridge
        over a strip of lava that replaces the whole wall."""
        along = "x" if one.min_x == other.min_x else "z"  # the axis along the wall between them
        least = getattr(one, f"min_{along}")
        width = _GAP if obstacle == "gap" else _BRIDGE
        start = least + float(self.np_random.uniform(0.5, _ROOM - width - 0.5))
        if obstacle == "gap":
            self.connect_rooms(one, other, **{f"min_{along}": start, f"max_{along}": start + width})
            return
        self.connect_rooms(one, other, **{f"min_{along}": least, f"max_{along}": least + _ROOM})
        passage = self.rooms[-1]  # miniworld makes the connection a room too
        strip = (passage.min_x, passage.max_x, passage.min_z, passage.max_z)
        bridge = (start, start + width, *strip[2:]) if along == "x" else (*strip[:2], start, start + width)
        self.lava.append(_Floor(_LAVA_TEXTURE, strip, 0.01))
        self.bridges.append(_Floor(_BRIDGE_TEXTURE, bridge, 0.02))
        self.entities += [self.lava[-1], self.bridges[-1]]

    # -- one tick -------------------------------------------------------------------------------------

    def move(self, metres: float) -> None:
        """Move the agent forward, or back where ``metres`` is negative. It slides along walls, as a player of
        Minecraft does."""
        agent, step = self.agent, self.agent.dir_vec * metres
        for position in (agent.pos + step, agent.pos + step * (1, 0, 0), agent.pos + step * (0, 0, 1)):
            if not intersect_circle_segs(position, agent.radius, self.wall_segs):
                agent.pos = position
                return

    @property
    def burns(self) -> bool:
        """Whether the agent is on lava and not on a bridge."""
        x, _, z = self.agent.pos
        return any(f.contains(x, z) for f in self.lava) and not any(f.contains(x, z) for f in self.bridges)

    @property
    def touches_gold(self) -> bool:
        """Whether the agent's circle is within ``_TOUCH`` of the gold block, whose base is a square of side
        1."""
        offset = self.agent.pos - self.gold.pos
        turn = self.gold.dir  # x and z below are the offset along the sides of the square
        x = offset[0] * math.cos(turn) - offset[2] * math.sin(turn)
        z = offset[0] * math.sin(turn) + offset[2] * math.cos(turn)
        distance = math.hypot(max(abs(x) - 0.5, 0.0), max(abs(z) - 0.5, 0.0))
        return distance <= float(self.agent.radius) + _TOUCH

    # -- pictures -------------------------------------------------------------------------------------

    def _render_static(self) -> None:
        if not self._display_list:
            self._display_list = gl.glGenLists(1)
        gl.glNewList(self._display_list, gl.GL_COMPILE)
        four_floats = gl.GLfloat * 4
        gl.glLightfv(gl.GL_LIGHT0, gl.GL_POSITION, four_floats(*self.light_pos, 1))
        gl.glLightfv(gl.GL_LIGHT0, gl.GL_AMBIENT, four_floats(*self.light_ambient))
        gl.glLightfv(gl.GL_LIGHT0, gl.GL_DIFFUSE, four_floats(*self.light_color))
        for feature in (gl.GL_LIGHTING, gl.GL_LIGHT0, gl.GL_COLOR_MATERIAL, gl.GL_TEXTURE_2D):
            gl.glEnable(feature)
        gl.glShadeModel(gl.GL_SMOOTH)
        gl.glColorMaterial(gl.GL_FRONT_AND_BACK, gl.GL_AMBIENT_AND_DIFFUSE)
        for room in self.rooms:
            room._render()
        for entity in self.entities:
            if entity is not self.agent:
                entity.render()
        gl.glEndList()

    def render_obs(self, frame_buffer: Any = None) -> Frame:
        """The agent's view [H, W, 3], with an aspect ratio of 4 : 3 whatever the shape of the buffer."""
        buffer = self.obs_fb if frame_buffer is None else frame_buffer
        self.shadow_window.switch_to()
        buffer.bind()
        gl.glClearColor(*self.sky_color, 1.0)
        gl.glClearDepth(1.0)
        gl.glClear(gl.GL_COLOR_BUFFER_BIT | gl.GL_DEPTH_BUFFER_BIT)
        gl.glMatrixMode(gl.GL_PROJECTION)
        gl.glLoadIdentity()
        gl.gluPerspective(self.agent.cam_fov_y, _ASPECT, 0.04, 100.0)
        gl.glMatrixMode(gl.GL_MODELVIEW)
        gl.glLoadIdentity()
        eye = self.agent.cam_pos
        gl.gluLookAt(*eye, *(eye + self.agent.cam_dir), 0.0, 1.0, 0.0)
        gl.glCallList(self._display_list)
        image: Frame = buffer.resolve()
        return image


class MazeGame:
    """See ``Game`` and ``MazeWorld``. level: 0 for the curriculum. seconds: of game time until an episode is
    truncated, on levels 1 to 4 and on level 5."""

    success: bool | None = None

    def __init__(
        self, *, level: int, advance_every: int, frame_skip: int, seconds: tuple[float, float], picture: bool
    ) -> None:
        self._level, self._advance_every, self._skip = level, advance_every, frame_skip
        self._seconds = seconds
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # miniworld prints how many samples a pixel has
                self._maze = _Maze(picture)
        except Exception as problem:
            raise _no_opengl(problem) from problem
        self._ticks = 0  # of the present episode
        self._generator_at_begin: dict[str, Any] = {}  # state from which the present episode's maze follows

    def begin(self, seed: int | None, steps: int) -> Frame:
        if seed is not None:
            self._maze.np_random = np.random.Generator(np.random.PCG64(seed))
        self._generator_at_begin = dict(self._maze.np_random.bit_generator.state)
        self._maze.level = self._level or min(5, 1 + steps // self._advance_every)
        self._ticks = 0
        return _channels_first(self._maze.reset()[0])

    def step(self, action: int) -> tuple[Frame, float, bool, bool]:
        maze, reward = self._maze, COMMAND
        limit = round(self._seconds[maze.level == 5] * TICKS_PER_SECOND)
        for _ in range(min(self._skip, limit - self._ticks)):
            self._ticks += 1
            self._act(action)
            if maze.touches_gold or maze.burns:
                self.success = bool(maze.touches_gold)
                reward += GOAL if self.success else DEATH
                # an old image, because it is ignored: see ``Game.step``
                return _channels_first(maze.obs_fb.img_array), reward, True, False
        timed_out = self._ticks >= limit
        if timed_out:
            self.success = False
        if timed_out and maze.level < 5:
            reward += DEATH
        return _channels_first(maze.render_obs()), reward, False, timed_out

    def picture(self) -> Frame:
        return self._maze.render_obs(self._maze.vis_fb)

    def kill(self) -> bool:
        return False

    def close(self) -> None:
        self._maze.close()

    def state(self) -> dict[str, Any]:
        maze = self._maze
        x, _, z = maze.agent.pos
        return {
            "generator": self._generator_at_begin,
            "level": maze.level,
            "ticks": self._ticks,
            "place": [float(x), float(z), float(maze.agent.dir)],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Make the level again from the generator's state, and put the agent where it was."""
        maze = self._maze
        maze.np_random = np.random.Generator(np.random.PCG64(0))
        maze.np_random.bit_generator.state = self._generator_at_begin = state["generator"]
        maze.level, self._ticks = state["level"], state["ticks"]
        maze.reset()
        x, z, turn = state["place"]
        maze.agent.pos, maze.agent.dir = np.array([x, 0.0, z]), turn

    def _act(self, action: int) -> None:
        """Do one tick of an action: 0 and 1 turn left and right, 2 and 3 move forward and back."""
        maze = self._maze
        if action < 2:
            maze.agent.dir += (1 - 2 * action) * _TURN / TICKS_PER_SECOND
        else:
            maze.move((5 - 2 * action) * _SPEED / TICKS_PER_SECOND)


def _channels_first(image: Frame) -> Frame:
    return image.transpose(2, 0, 1)
