"""Images beside numbers in flattened observations."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from murmurate.agents.a2c import A2C
from murmurate.nets.conv import ConvTorso
from murmurate.nets.mlp import MLP
from murmurate.nets.moments import observation_normalizer
from murmurate.nets.parts import PartsTorso
from murmurate.nets.torso import build_torso, torsos, usual_torso
from murmurate.replica.vector import Replica
from murmurate.replicator.collectives import Group
from murmurate.replicator.learner import Context
from murmurate.spec import EnvSpec

SHAPE = (3, 24, 28)
PIXELS = 3 * 24 * 28
PARTS = (
    ("camera", 1, 1 + PIXELS, SHAPE),
    ("speed", 1 + PIXELS, 3 + PIXELS, ()),
)
SPEC = EnvSpec("car", (3 + PIXELS,), torch.float32, actions=2, parts=(("heat", 0, 1, ()), *PARTS))


def draw(history: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(observations, images [4, history * 3, 24, 28], numbers [4, history * 3])."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (4, history, *SHAPE), generator=generator, dtype=torch.uint8)
    numbers = torch.randn(4, history, 3, generator=generator)
    steps = torch.cat([numbers[..., :1], images.flatten(2).float(), numbers[..., 1:]], -1)
    return steps.flatten(1), images.flatten(1, 2), torch.cat([numbers[..., :1], numbers[..., 1:]], -1)


@pytest.mark.parametrize("history", [1, 3])
def test_features_are_those_of_the_image_and_the_numbers(history: int) -> None:
    spec = dataclasses.replace(SPEC, observation_shape=(history * (3 + PIXELS),), history=history)
    torso = build_torso(spec, "auto", (32, 16))
    assert isinstance(torso, PartsTorso)
    observation, images, numbers = draw(history)
    (image,) = torso.torsos
    assert isinstance(image, ConvTorso)
    heat, speed = numbers[..., :1].flatten(1), numbers[..., 1:].flatten(1)
    expected = torso.mlp(torch.cat([image(images), heat, speed], 1))
    assert expected.shape == (4, 16)
    assert torch.equal(torso(observation), expected)


def test_uint8_vectors_are_read_alike() -> None:
    parts = (
        ("eye", 0, PIXELS, SHAPE),
        ("hand", PIXELS, 2 * PIXELS, SHAPE),
        ("gear", 2 * PIXELS, 2 * PIXELS + 1, ()),
    )
    spec = EnvSpec("arm", (2 * PIXELS + 1,), torch.uint8, actions=2, parts=parts)
    torso = build_torso(spec, "auto", (8,))
    assert [type(each) for each in torso.torsos] == [ConvTorso, ConvTorso]  # type: ignore[union-attr, arg-type]
    observation = torch.randint(256, (2, 2 * PIXELS + 1), generator=torch.Generator().manual_seed(1)).byte()
    assert torch.equal(torso(observation), torso(observation.float()))


def test_small_images_and_mlp_are_read_as_numbers() -> None:
    small = EnvSpec(
        "tiny", (49,), torch.float32, actions=2, parts=(("eye", 0, 48, (3, 4, 4)), ("x", 48, 49, ()))
    )
    assert usual_torso(small) == "mlp"
    assert isinstance(build_torso(small, "auto", (8,)), MLP)
    assert usual_torso(SPEC) == "nature2013"
    assert isinstance(build_torso(SPEC, "mlp", (8,)), MLP)
    with pytest.raises(ValueError, match="too small"):
        build_torso(small, "nature2013", (8,))


@pytest.mark.parametrize("name", sorted(set(torsos()) - {"mlp"}))
def test_every_torso_of_images_can_read_a_part(name: str) -> None:
    shape = (3, 84, 84)
    size = 3 * 84 * 84
    spec = EnvSpec(
        "car", (size + 1,), torch.float32, 2, parts=(("eye", 0, size, shape), ("x", size, size + 1, ()))
    )
    torso = build_torso(spec, name, (8,)).to(torch.bfloat16)
    features = torso(torch.full((2, size + 1), 300.0))
    assert features.shape == (2, 8)
    assert features.dtype == torch.bfloat16
    features.sum().backward()
    assert all(parameter.grad is not None for parameter in torso.parameters())


def test_small_images_beside_a_large_one_are_read_as_numbers() -> None:
    large = 24 * 28
    parts = (("map", 0, 16, (1, 4, 4)), ("eye", 16, 16 + large, (1, 24, 28)))
    spec = EnvSpec("car", (16 + large,), torch.uint8, 2, parts=parts)
    torso = build_torso(spec, "auto", (8,))
    assert isinstance(torso, PartsTorso)
    observation = torch.randint(256, (3, 16 + large), generator=torch.Generator().manual_seed(3)).byte()
    (image,) = torso.torsos
    features = image(observation[:, 16:].reshape(3, 1, 24, 28))
    expected = torso.mlp(torch.cat([features, observation[:, :16] / 255], 1))
    assert torch.equal(torso(observation), expected)


def test_numbers_beside_images_are_not_rounded_to_bfloat16() -> None:
    agent = A2C(precision="bfloat16").build(Context(SPEC, Replica, 0, open_group=Group.of_one))
    observation = torch.zeros(2, 3 + PIXELS)
    observation[:, 0] = torch.tensor([1000.0, 1001.0])
    one, other = agent.net.torso(observation)
    assert not torch.equal(one, other)


def test_images_are_not_normalised() -> None:
    refused = partial(observation_normalizer, SPEC)
    assert refused(False) is None
    with pytest.raises(ValueError, match="leave out normalize_observations"):
        refused(True)
