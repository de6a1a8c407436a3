"""Every gymnasium space against the environment itself, step by step, and spaces that are refused."""

from __future__ import annotations

import copy
import itertools
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces.utils import flatten

from murmurate.errors import Refusal
from murmurate.nets.action_mask import ActionMask, action_mask
from murmurate.worlds._spaces import action_format, holds_image, observation_format
from murmurate.worlds.generators import simulator_seed
from murmurate.worlds.gym_simulators import GymSimulators, spec_of

IMAGE = spaces.Box(0, 255, (12, 16, 3), np.uint8)
OBSERVATIONS = {
    "Discrete": spaces.Discrete(5, start=2),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4], start=[1, 2]),
    "MultiBinary": spaces.MultiBinary([2, 3]),
    "Tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2, 2), np.float64))),
    "nested Dict": spaces.Dict(
        {"b": spaces.Dict({"x": spaces.Discrete(2), "a": spaces.Box(0, 9, (), np.float32)}),
         "a": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(0, 255, (4,), np.uint8)))}
    ),
    "OneOf": spaces.OneOf((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32))),
}  # fmt: skip
ACTIONS = {
    "Discrete": spaces.Discrete(3, start=-1),
    "MultiDiscrete": spaces.MultiDiscrete([[2, 3], [1, 2]], start=[[5, 0], [0, -1]]),
    "MultiBinary": spaces.MultiBinary(3),
    "nested": spaces.Dict(
        {"d": spaces.Tuple((spaces.Discrete(2, start=1), spaces.MultiBinary([1, 2]))),
         "c": spaces.MultiDiscrete([3])}
    ),
    "vectors": spaces.Dict(
        {"f": spaces.Box(-1, 2, (2,), np.float32), "e": spaces.Tuple((spaces.Box(0, 1, (1, 2), np.float32),))}
    ),
}  # fmt: skip


class Echo(gymnasium.Env):  # type: ignore[type-arg]
    """Draws its observations from their space, and checks and remembers its actions."""

    taken: ClassVar[list[Any]] = []

    def __init__(self, seen: Any, chosen: Any) -> None:
        self.observation_space, self.action_space = seen, chosen

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed % 2**31)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        Echo.taken.append(action)
        return self.observation_space.sample(), 1.0, False, False, {}


def copies(space: Any) -> Any:
    return lambda b: (Echo(copy.deepcopy(space), spaces.Discrete(2)), 7)


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_observations_are_those_of_the_environment_flattened(kind: str) -> None:
    space = OBSERVATIONS[kind]
    simulators = GymSimulators("echo", copies(space), 2, 3)
    spec = simulators.spec
    assert len(spec.observation_shape) == 1
    assert spec.observation_dtype == torch.float32
    alone = [Echo(copy.deepcopy(space), spaces.Discrete(2)) for _ in range(2)]
    step = simulators.reset(4)
    expected = [env.reset(seed=simulator_seed(4, 3 + b))[0] for b, env in enumerate(alone)]
    ends = []
    for t in range(1, 17):
        rows = [np.asarray(flatten(space, one), np.float32) for one in expected]
        assert np.array_equal(step.observation.numpy(), np.stack(rows))
        simulators.send(torch.tensor([0, 1]))
        step = simulators.receive()
        expected = [env.step(0)[0] for env in alone]
        if step.truncated.any():
            assert step.final_observation is not None
            finals = [np.asarray(flatten(space, one), np.float32) for one in expected]
            assert np.array_equal(step.final_observation.numpy(), np.stack(finals))
            expected = [env.reset()[0] for env in alone]
            ends.append(t)
    assert ends == [7, 14]


def test_an_image_alone_stays_an_image() -> None:
    space = spaces.Dict(
        {"camera": IMAGE, "speed": spaces.Box(0, 1, (2,)), "in": spaces.Dict({"gear": spaces.Discrete(3)})}
    )
    camera = observation_format(space, "car", ["camera"])
    sample = space.sample()
    assert camera.uint8
    assert np.array_equal(camera.convert(sample), np.moveaxis(sample["camera"], -1, 0))
    several = observation_format(space, "car", ["speed", "in.gear"])
    assert several.shape == (5,)
    assert several.parts == (("in.gear", 0, 3, ()), ("speed", 3, 5, ()))
    part = spaces.Dict({"in.gear": space["in"]["gear"], "speed": space["speed"]})
    assert np.array_equal(
        several.convert(sample), flatten(part, {"in.gear": sample["in"]["gear"], "speed": sample["speed"]})
    )
    assert holds_image(space)
    assert not holds_image(space["speed"])


def test_images_beside_numbers_are_flattened_with_their_channels_first() -> None:
    space = spaces.Dict(
        {"eye": IMAGE, "gear": spaces.Discrete(3), "stack": spaces.Box(0, 255, (2, 8, 8, 3), np.uint8)}
    )
    format_ = observation_format(space, "car")
    size, stack = 12 * 16 * 3, 2 * 8 * 8 * 3
    assert format_.parts == (
        ("eye", 0, size, (3, 12, 16)),
        ("gear", size, size + 3, ()),
        ("stack", size + 3, size + 3 + stack, (6, 8, 8)),
    )
    assert not format_.uint8
    sample = space.sample()
    vector = format_.convert(sample)
    eye, gear, images = np.split(vector, [size, size + 3])
    assert np.array_equal(eye.reshape(3, 12, 16), np.moveaxis(sample["eye"], -1, 0))
    assert gear.tolist() == [float(sample["gear"] == n) for n in range(3)]
    assert np.array_equal(images.reshape(2, 3, 8, 8), np.moveaxis(sample["stack"], -1, 1))
    with pytest.raises(ValueError, match="'eye' of its observation"):
        format_.convert(sample | {"eye": sample["eye"][1:]})
    # images alone stay bytes
    assert observation_format(spaces.Tuple([IMAGE, IMAGE]), "car").uint8
    spec = spec_of("car", format_, action_format(spaces.Discrete(2), "car"))
    assert spec.parts == format_.parts


def test_a_mask_needs_a_number_for_each_action() -> None:
    space = spaces.Dict({"action_mask": spaces.MultiBinary(5), "x": spaces.Box(-1, 1, (2,))})
    observations = observation_format(space, "locks")
    pair = spaces.MultiDiscrete([2, 3])

    def mask(actions: Any, joint: int = 1024) -> ActionMask | None:
        return action_mask(spec_of("locks", observations, action_format(actions, "locks", joint)))

    assert mask(spaces.Discrete(5)) is not None
    assert mask(pair, 0) is not None
    assert mask(spaces.Box(-1, 1, (2,))) is None
    with pytest.raises(Refusal, match=r"has 5 numbers, and there are 6 .*--world\.joint-actions"):
        mask(pair)
    with pytest.raises(
        Refusal, match=r"has 5 numbers, and there are 4 .* MultiBinary\(4\).*--world\.observe"
    ):
        mask(spaces.Discrete(4))


def test_the_mask_of_a_board_is_no_image() -> None:
    board = spaces.Dict({"action_mask": spaces.Box(0, 1, (5, 5, 2), np.uint8), "x": spaces.Discrete(2)})
    assert not holds_image(board)
    format_ = observation_format(board, "board")
    assert format_.parts[0] == ("action_mask", 0, 50, ())
    sample = board.sample()
    assert np.array_equal(format_.convert(sample)[:50], sample["action_mask"].ravel())


def test_each_part_of_an_action_may_have_a_mask_of_its_own() -> None:
    masks = spaces.Tuple([spaces.MultiBinary(2), spaces.MultiBinary(3)])
    space = spaces.Dict({"action_mask": masks, "x": spaces.Box(-1, 1, (1,))})
    observations = observation_format(space, "locks")
    mask = action_mask(
        spec_of("locks", observations, action_format(spaces.MultiDiscrete([2, 3]), "locks", 0))
    )
    assert mask is not None
    fits = (np.array([0, 1], np.int8), np.array([1, 0, 1], np.int8))
    vector = observations.convert({"action_mask": fits, "x": np.zeros(1, np.float32)})
    assert mask.legal(torch.as_tensor(vector)).tolist() == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("shape", "converted"),
    [
        ((12, 16, 4), (4, 12, 16)),
        ((12, 16, 2), (2, 12, 16)),
        ((5, 12, 16, 4), (20, 12, 16)),
        ((4, 4, 3), (3, 4, 4)),
        ((4, 12, 16), (4, 12, 16)),
        ((16, 4, 4), (16, 4, 4)),
        ((84, 84, 9), (9, 84, 84)),
        ((96, 96, 6), (6, 96, 96)),
        ((128, 128, 24), (24, 128, 128)),
        ((2, 84, 84, 6), (12, 84, 84)),
        ((24, 24, 12), (24, 24, 12)),
        ((8, 8, 5), (8, 8, 5)),
        ((64, 40, 40), (64, 40, 40)),
    ],
)
def test_the_last_axis_of_an_image_is_its_channels(
    shape: tuple[int, ...], converted: tuple[int, ...]
) -> None:
    assert observation_format(spaces.Box(0, 255, shape, np.uint8), "car").shape == converted


@pytest.mark.parametrize(
    ("space", "seen"),
    [
        (OBSERVATIONS["Discrete"], 1),
        (OBSERVATIONS["Discrete"], -1),
        (OBSERVATIONS["MultiDiscrete"], np.array([1, 6])),
        (OBSERVATIONS["MultiBinary"], np.full((2, 3), 2)),
        (OBSERVATIONS["Tuple"], (-1, np.zeros((2, 2)))),
        (OBSERVATIONS["OneOf"], (2, 1)),
        (spaces.MultiDiscrete([3, 4]), np.array([0.5, np.nan])),
    ],
)
def test_what_is_not_in_a_discrete_space_is_no_observation(space: Any, seen: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)its observation is .* and not in"):
        observation_format(space, "car").convert(seen)


def test_a_discrete_observation_may_have_another_type() -> None:
    convert = observation_format(spaces.Dict({"a": spaces.Discrete(2)}), "car").convert
    for one in (1, np.bool_(True), np.uint8(1), np.array([1])):
        assert convert({"a": one}).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("space", "observe", "words"),
    [
        (spaces.Dict({"eye": IMAGE}), ("ear",), "no key 'ear'.*from: eye"),
        (spaces.Discrete(3), ("ear",), "no Dict with the key 'ear'"),
        (spaces.Dict({"bag": spaces.Sequence(spaces.Discrete(2))}), (), r"'bag' \(Sequence\).*fixed size"),
        (spaces.Sequence(spaces.Discrete(2)), (), "hold a Sequence, which has no fixed size"),
        (spaces.Dict({}), (), r"Dict\(\), which holds no numbers"),
        (spaces.Box(0, 1, (2, 0)), (), "which holds no numbers"),
    ],
)
def test_observations_that_are_refused(space: Any, observe: tuple[str, ...], words: str) -> None:
    with pytest.raises(Refusal, match=f"(?s)of car.*{words}"):
        observation_format(space, "car", observe)


@pytest.mark.parametrize("text", ["abcde", "é", 5])
def test_texts_that_do_not_fit_are_refused(text: object) -> None:
    convert = observation_format(spaces.Dict({"sign": spaces.Text(4)}), "car").convert
    assert len(convert({"sign": "abc"})) == 4
    with pytest.raises(ValueError, match=f"'sign' of its observation is {text!r}, and not in Text"):
        convert({"sign": text})


@pytest.mark.parametrize("kind", [kind for kind in ACTIONS if kind != "vectors"])
def test_every_joint_action_is_one_of_the_environments_own(kind: str) -> None:
    space = ACTIONS[kind]
    simulators = GymSimulators("echo", lambda b: (Echo(spaces.Box(0, 1, (1,)), space), 99), 2, 0)
    simulators.reset(0)
    Echo.taken.clear()
    count = simulators.spec.actions
    for number in range(count):
        simulators.send(torch.tensor([number, count - 1 - number]))
        simulators.receive()
    assert len({str(flatten(space, action)) for action in Echo.taken[::2]}) == count
    sampled = {str(flatten(space, space.sample())) for _ in range(300)}
    assert sampled <= {str(flatten(space, action)) for action in Echo.taken}
    with pytest.raises(ValueError, match=f"actions 0 to {count - 1}"):
        simulators.send(torch.tensor([0, count]))


def test_parts_of_an_action_chosen_each_for_itself() -> None:
    space = ACTIONS["nested"]
    taken = action_format(space, "echo", joint_actions=11)
    assert (taken.actions, taken.factors) == (0, (3, 2, 2, 2))
    assert action_format(space, "echo", joint_actions=24).actions == 24
    rows = np.array(list(itertools.product(range(3), range(2), range(2), range(2))), np.float32)
    joint, apart = action_format(space, "echo").convert(np.arange(24)), taken.convert(rows)
    assert [str(a) for a in joint] == [str(a) for a in apart]
    assert all(space.contains(action) for action in apart)
    assert space.contains(taken.convert(np.array([[9.0, -3.0, 0.6, 1.0]]))[0])


def test_vectors_are_joined_and_clipped() -> None:
    space = ACTIONS["vectors"]
    taken = action_format(space, "echo")
    assert (taken.shape, taken.low, taken.high) == ((4,), (0, 0, -1, -1), (1, 1, 2, 2))
    (one,) = taken.convert(np.array([[5, 0.25, -5, 1.5]], np.float32))
    assert space.contains(one)
    assert one["e"][0].tolist() == [[1.0, 0.25]]
    assert one["f"].tolist() == [-1.0, 1.5]


def test_vectors_of_whole_numbers_are_rounded() -> None:
    space = spaces.Box(-2, 3, (3,), np.int16)
    chosen = np.array([[0.6, -1.7, 9.0]], np.float32)
    (alone,) = action_format(space, "echo").convert(chosen)
    (within,) = action_format(spaces.Tuple((space,)), "echo").convert(chosen)
    for action in (alone, within[0]):
        assert space.contains(action)
        assert action.tolist() == [1, -2, 3]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,)))),
        spaces.Text(4),
        spaces.Dict({}),
        spaces.Box(0, 1, (0,)),
    ],
)
def test_actions_that_are_refused(space: Any) -> None:
    with pytest.raises(Refusal, match=r"The actions of echo are .*ActionWrapper"):
        action_format(space, "echo")
