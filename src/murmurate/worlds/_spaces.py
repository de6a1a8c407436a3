"""Converts gymnasium's spaces to what agents use: one array as observation, a number or vector as action.

Imports no torch, so that the game server (``_game_server.py``) can use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces.utils import flatdim, flatten, flatten_space

from murmurate.errors import Refusal
from murmurate.worlds._images import box_converter, converted_shape, is_image
from murmurate.worlds._numbers import check_actions, checked_numbers

spaces = gymnasium.spaces
JOINT_ACTIONS = 1024  # default of ``joint_actions`` in ``action_format``
Part = tuple[str, int, int, tuple[int, ...]]


@dataclass(frozen=True)
class ObservationFormat:
    """How observations of a space reach an agent.

    shape: shape of one observation. uint8: whether its dtype is uint8; otherwise float32.
    convert: converts an observation of the space to an array of that shape; raises ``ValueError`` for one
    that does not fit.
    parts: where observations are flattened, (path, start, stop, shape) of each innermost space in the vector,
    in order; ``outer.inner`` is the path of a key in a nested Dict; shape [C, H, W] is that of an image, else
    empty.
    """

    shape: tuple[int, ...]
    uint8: bool
    convert: Callable[[Any], Any]
    parts: tuple[Part, ...] = ()

    @property
    def dtype(self) -> type[np.uint8] | type[np.float32]:
        return np.uint8 if self.uint8 else np.float32


@dataclass(frozen=True)
class ActionFormat:
    """An agent's actions in a space: numbers from 0 to ``actions`` - 1, or vectors of ``shape`` between
    ``low`` and ``high``.

    factors: how many values each part of an action has, where each part is chosen independently; an action is
    then a vector of whole numbers.
    convert: converts an agent's actions, [B] int64 or [B, *shape] float32, to B actions of the space. Vectors
    are clipped; a number that is no action raises ``ValueError``.
    """

    actions: int
    factors: tuple[int, ...]
    shape: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    convert: Callable[[npt.NDArray[Any]], Sequence[Any]]


def observation_format(space: Any, name: str, observe: Sequence[str] = ()) -> ObservationFormat:
    """How observations of ``space`` reach an agent.

    Images [H, W, C] become [C, H, W], and stacks of K of them [K C, H, W]; other arrays stay as they are; all
    other observations are flattened to a vector by gymnasium's ``flatten``, with images in them as above.

    Args:
        name: name of the world, for messages.
        observe: keys of a Dict space (``outer.inner`` in a nested one); other keys are left out; empty for
            all.

    Raises:
        Refusal: for a space without a fixed size or without numbers, or a key that is not there.
    """
    selected, pick = _selected(space, name, observe)
    if all(leaf.shape is not None and 0 in leaf.shape for _, leaf in _leaves(selected)):
        raise Refusal(
            f"The observations of {name} are {selected}, which holds no numbers, and an agent needs one at "
            "least. Apply a wrapper that gives a constant, such as [1.0]."
        )
    if isinstance(selected, spaces.Box) and selected.shape:
        convert = box_converter(selected)
        return ObservationFormat(
            converted_shape(selected),
            bool(selected.dtype == np.uint8),
            convert if pick is None else lambda observation: convert(pick(observation)),
        )
    if not selected.is_np_flattenable:
        unfit = [
            f"'{path}' ({type(leaf).__name__})" if path else f"a {type(leaf).__name__}"
            for path, leaf in _leaves(selected)
            if not leaf.is_np_flattenable
        ]
        raise Refusal(
            f"The observations of {name} hold {', '.join(unfit)}, which has no fixed size. Choose other keys "
            "of a Dict with --world.observe KEY,..., or apply a wrapper that gives an array."
        )
    flat: Any = flatten_space(selected)
    parts = [(path, leaf, _flattener(".".join(map(str, path)), leaf)) for path, leaf in _parts(selected)]

    def flattened(observation: Any) -> Any:
        value = observation if pick is None else pick(observation)
        for path, leaf, _ in parts:
            _check_part(path, leaf, value)
        vector: Any = np.concatenate([flat_part(_item_at(value, path)) for path, _, flat_part in parts])
        if np.shape(vector) != flat.shape:
            raise ValueError(
                f"its observation has {np.size(vector)} numbers when flattened, not {flat.shape[0]}"
            )
        return vector

    return ObservationFormat(
        tuple(flat.shape), bool(flat.dtype == np.uint8), flattened, tuple(_flat_parts(selected))
    )


def part_spaces(space: Any, name: str, observe: Sequence[str] = ()) -> dict[str, Any]:
    """The spaces of ``ObservationFormat.parts`` by path. name, observe: see ``observation_format``."""
    return dict(_leaves(_selected(space, name, observe)[0]))


def batch_size(space: Any, name: str, observe: Sequence[str], observations: Any) -> int | None:
    """B, if ``observations`` is a mapping or tuple in which every array that is observed has an axis B in
    front of its shape in ``space``; else None. name, observe: see ``observation_format``."""
    if not isinstance(observations, Mapping | tuple):
        return None
    selected, pick = _selected(space, name, observe)
    sizes = set()
    try:
        values = observations if pick is None else pick(observations)
        for path, leaf in _parts(selected):
            shape = np.shape(_item_at(values, path))
            if leaf.shape is None or len(shape) == 0 or shape[1:] != leaf.shape:
                return None
            sizes.add(shape[0])
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    if sizes == {1} and all(leaf.shape == () for _, leaf in _parts(selected)):
        return None  # single discrete observations may be arrays of one number
    return sizes.pop() if len(sizes) == 1 else None


def row_of(observations: Any, b: int) -> Any:
    """Observation ``b`` of a batch that is an array, or a mapping or tuple of arrays."""
    if isinstance(observations, Mapping):
        return {key: row_of(part, b) for key, part in observations.items()}
    if isinstance(observations, tuple):
        return tuple(row_of(part, b) for part in observations)
    return observations[b]


def description(space: Any, name: str, observe: Sequence[str] = ()) -> str:
    """Observations of ``space`` in words: "a Dict with the keys goal (2,), load (2,)". name, observe: see
    ``observation_format``."""
    selected, _ = _selected(space, name, observe)
    if len(observe) == 1:
        return f"a Dict with the key {observe[0]}: {selected}"
    if not isinstance(selected, spaces.Dict):
        return str(selected)
    parts = [
        f"{path} {'' if leaf.shape is None else leaf.shape}".rstrip() for path, leaf in _leaves(selected)
    ]
    return f"a Dict with the keys {', '.join(parts)}"


def holds_image(space: Any) -> bool:
    """Whether a space is an image, or has one in it."""
    return any(_is_image(path, leaf) for path, leaf in _leaves(space))


def action_format(space: Any, name: str, joint_actions: int = JOINT_ACTIONS) -> ActionFormat:
    """How an agent's actions become actions of ``space``.

    In MultiDiscrete, MultiBinary, and a Dict or Tuple of discrete spaces, an action is one number if there
    are at most ``joint_actions`` combinations; otherwise each part is chosen independently
    (``ActionFormat.factors``). In a Dict or Tuple of Box spaces it is one vector.

    Raises:
        Refusal: for other spaces, and for discrete parts beside vectors.
    """
    if isinstance(space, spaces.Discrete):
        return _discrete_actions(space, name)
    if isinstance(space, spaces.Box) and space.shape and space.low.size:
        low, high = space.low, space.high
        return _vector_actions(
            low, high, tuple(space.shape), lambda action: _in_dtype(np.clip(action, low, high), space)
        )
    leaves = [leaf for _, leaf in _leaves(space)]
    if all(isinstance(leaf, spaces.Box) for leaf in leaves) and any(leaf.low.size for leaf in leaves):
        low = np.concatenate([np.ravel(leaf.low) for leaf in leaves])
        high = np.concatenate([np.ravel(leaf.high) for leaf in leaves])
        return _vector_actions(
            low,
            high,
            low.shape,
            lambda action: [_take_action(space, iter(row)) for row in np.clip(action, low, high)],
        )
    counts = [count for leaf in leaves for count in _counts(leaf)]
    if not counts or not all(isinstance(leaf, _DISCRETE) for leaf in leaves):
        raise Refusal(
            f"The actions of {name} are {space}: an agent takes discrete ones or vectors, not both and no "
            "others. Apply an ActionWrapper that makes them Discrete, MultiDiscrete, MultiBinary or Box."
        )
    total = math.prod(counts)
    if len(counts) == 1 or total <= joint_actions:

        def convert_numbers(action: npt.NDArray[Any]) -> Sequence[Any]:
            check_actions(action, total, name)
            rows = np.stack(np.unravel_index(action, counts), -1)
            return [_take_action(space, iter(row)) for row in rows]

        return ActionFormat(total, (), (), (), (), convert_numbers)
    largest = np.array(counts) - 1

    def convert_factors(action: npt.NDArray[Any]) -> Sequence[Any]:
        rows = np.clip(np.rint(action), 0, largest).astype(np.int64)
        return [_take_action(space, iter(row)) for row in rows]

    lowest, highest = (0.0,) * len(counts), tuple(float(count - 1) for count in counts)
    return ActionFormat(0, tuple(counts), (len(counts),), lowest, highest, convert_factors)


_DISCRETE = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def _leaves(space: Any) -> Iterator[tuple[str, Any]]:
    """(path, space) of each innermost space of a Dict or Tuple, in order; else of ``space`` itself."""
    for path, leaf in _parts(space):
        yield ".".join(map(str, path)), leaf


def _parts(space: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """As ``_leaves``, with the keys and indices of a path in a tuple."""
    if isinstance(space, spaces.Dict):
        parts: Any = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
    else:
        yield path, space
        return
    for key, part in parts:
        yield from _parts(part, (*path, key))


def _flat_parts(space: Any) -> Iterator[Part]:
    """See ``ObservationFormat.parts``."""
    start = 0
    for path, leaf in _leaves(space):
        stop = start + flatdim(leaf)
        yield path, start, stop, converted_shape(leaf) if _is_image(path, leaf) else ()
        start = stop


def _is_image(path: str, leaf: Any) -> bool:
    """Whether a part is an image. A mask of actions (``nets/action_mask.py``), such as that of a board, is
    none."""
    return path.partition(".")[0] != "action_mask" and is_image(leaf)


def _flattener(path: str, space: Any) -> Callable[[Any], Any]:
    """A function that flattens an observation of an innermost space to a vector."""
    if _is_image(path, space):
        convert = box_converter(space)
        return lambda image: np.ravel(convert(image))
    return lambda value: flatten(space, value)


def _check_part(path: tuple[Any, ...], space: Any, observation: Any) -> None:
    """Raise ``ValueError`` unless ``observation`` has a part of the shape of ``space`` at ``path``, and for a
    discrete space or a Text one of its values."""
    place = f"'{'.'.join(map(str, path))}' of its observation" if path else "its observation"
    try:
        part = _item_at(observation, path)
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"{place} is missing") from None
    if space.shape is None:  # Text, OneOf
        if isinstance(space, spaces.Text):
            is_short = isinstance(part, str) and len(part) <= space.max_length
            fits = is_short and not set(part) - space.character_set
        else:
            fits = space.contains(part)
        if not fits:
            raise ValueError(f"{place} is {part!r}, and not in {space}")
        return
    shape = np.shape(part)
    if [n for n in shape if n != 1] != [n for n in space.shape if n != 1]:  # a number is as good as [1]
        raise ValueError(f"{place} has the shape {list(shape)}, not {list(space.shape)}")
    array = checked_numbers(part, space.dtype, place)
    # ``flatten`` takes -1 for the last value of a discrete space
    if isinstance(space, _DISCRETE):
        with np.errstate(invalid="ignore"):
            whole = array.reshape(space.shape).astype(space.dtype)
        if not (np.array_equal(whole, array.reshape(space.shape)) and space.contains(whole)):
            raise ValueError(f"{place} is {part!r}, and not in {space}")


def _selected(space: Any, name: str, observe: Sequence[str]) -> tuple[Any, Callable[[Any], Any] | None]:
    """(the space of the keys in ``observe``, a function that picks these from an observation); without
    ``observe``, (``space``, None). A single key gives that key's own space, not a Dict."""
    if not observe:
        return space, None
    paths = {key: _path(space, name, key) for key in observe}
    parts = {key: _item_at(space, path) for key, path in paths.items()}
    if len(observe) == 1:
        (key,) = observe
        return parts[key], lambda raw: _item_at(raw, paths[key])
    return spaces.Dict(parts), lambda raw: {key: _item_at(raw, path) for key, path in paths.items()}


def _path(space: Any, name: str, key: str) -> tuple[str, ...]:
    """The keys of nested Dicts that lead to ``key`` ("outer.inner"). Raises ``Refusal`` if there are none."""
    path: list[str] = []
    rest = key
    while rest:
        if not isinstance(space, spaces.Dict):
            raise Refusal(
                f"The observations of {name} are no Dict with the key '{key}'. Leave out --world.observe."
            )
        head = rest if rest in space.spaces else rest.partition(".")[0]
        if head not in space.spaces:
            raise Refusal(
                f"The observations of {name} have no key '{key}'. "
                f"Choose with --world.observe from: {', '.join(map(str, space.spaces))}."
            )
        path.append(head)
        space, rest = space.spaces[head], rest[len(head) + 1 :]
    return tuple(path)


def _item_at(tree: Any, path: Sequence[Any]) -> Any:
    """What nested dicts and tuples hold at the end of ``path``."""
    for key in path:
        tree = tree[key]
    return tree


def _discrete_actions(space: Any, name: str) -> ActionFormat:
    count, start = int(space.n), int(space.start)

    def convert(action: npt.NDArray[Any]) -> Sequence[Any]:
        check_actions(action, count, name)
        numbers: list[int] = action.tolist()
        return [number + start for number in numbers] if start else numbers

    return ActionFormat(count, (), (), (), (), convert)


def _vector_actions(
    low: Any, high: Any, shape: tuple[int, ...], convert: Callable[[Any], Any]
) -> ActionFormat:
    return ActionFormat(0, (), shape, tuple(map(float, low.flat)), tuple(map(float, high.flat)), convert)


def _counts(leaf: Any) -> list[int]:
    """How many values each part of a discrete space has; empty for another space."""
    if isinstance(leaf, spaces.Discrete):
        return [int(leaf.n)]
    if isinstance(leaf, spaces.MultiDiscrete):
        return [int(n) for n in leaf.nvec.flat]
    return [2] * int(np.prod(leaf.shape)) if isinstance(leaf, spaces.MultiBinary) else []


def _take_action(space: Any, values: Iterator[Any]) -> Any:
    """The action of ``space`` made of the next numbers of ``values``, in the order of ``_leaves``."""
    if isinstance(space, spaces.Dict):
        return {key: _take_action(part, values) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_take_action(part, values) for part in space.spaces)
    if isinstance(space, spaces.Discrete):
        return int(next(values)) + int(space.start)
    action = np.array([next(values) for _ in range(int(np.prod(space.shape)))]).reshape(space.shape)
    if isinstance(space, spaces.MultiDiscrete):
        action = action + getattr(space, "start", 0)
    return _in_dtype(action, space)


def _in_dtype(action: Any, space: Any) -> Any:
    """``action`` in the dtype of ``space``, rounded where that holds whole numbers."""
    return (action if space.dtype.kind == "f" else np.rint(action)).astype(space.dtype, copy=False)
