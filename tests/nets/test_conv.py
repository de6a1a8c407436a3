"""Convolutional torsos against plain convolutions of frames divided by 255."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from murmurate.nets.conv import NATURE_2013, NATURE_2015, Convolution, ConvTorso
from murmurate.nets.initialize import orthogonal_

nature_2013 = partial(ConvTorso, layers=NATURE_2013, width=256)
nature_2015 = partial(ConvTorso, layers=NATURE_2015, width=512)
ATARI = (4, 84, 84)


def frames(seed, batch, shape=ATARI):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, *shape), dtype=torch.uint8, generator=generator)


def made(make, shape=ATARI, seed=0, **options):
    torso = make(shape, **options)
    orthogonal_(torso, 2**0.5, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in torso.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return torso


def plainly(torso, observation):
    """The definition: divide, convolve, rectify, flatten in (row, column, channel) order."""
    x = observation.double() / 255
    parameters = {name: p.double().contiguous() for name, p in torso.named_parameters()}
    for i, convolution in enumerate(torso.convolutions):
        weight, bias = parameters[f"convolutions.{i}.weight"], parameters[f"convolutions.{i}.bias"]
        x = F.conv2d(x, weight, bias, convolution.stride).relu()
    x = torch.stack([image.movedim(0, -1).reshape(-1) for image in x])
    return F.linear(x, parameters["linear.weight"], parameters["linear.bias"]).relu()


@pytest.mark.parametrize(
    ("make", "parameters", "width"),
    [
        # 16*(4*64+1) + 32*(16*16+1) + 256*(32*9*9+1)
        (nature_2013, 4_112 + 8_224 + 663_808, 256),
        # 32*(4*64+1) + 64*(32*16+1) + 64*(64*9+1) + 512*(64*7*7+1)
        (nature_2015, 8_224 + 32_832 + 36_928 + 1_606_144, 512),
    ],
)
def test_parameter_counts_and_widths(make, parameters, width):
    torso = make(ATARI)
    assert sum(p.numel() for p in torso.parameters()) == parameters
    assert torso.out_features == width
    features = torso(frames(0, 3))
    assert features.shape == (3, width)
    assert features.dtype == torch.float32


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        (ATARI, NATURE_2013),
        ((3, 84, 84), NATURE_2013),
        ((1, 52, 76), NATURE_2013),
        # not tiled by blocks of 4 pixels: neither way, in rows only, in columns only
        ((2, 70, 85), NATURE_2013),
        ((2, 72, 85), NATURE_2013),
        ((2, 70, 84), NATURE_2013),
        ((3, 40, 36), (Convolution(8, 4, 4), Convolution(8, 3, 1))),
        ((3, 40, 36), (Convolution(8, 12, 4), Convolution(8, 3, 2))),
        ((3, 40, 36), (Convolution(8, 6, 4),)),
        ((3, 20, 24), (Convolution(8, 5, 2), Convolution(8, 3, 1))),
    ],
)
def test_equals_plain_convolutions_forward_and_backward(shape, layers, channels_last):
    torso = made(ConvTorso, shape, layers=layers, width=32, channels_last=channels_last)
    x = frames(1, 5, shape)
    direction = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))

    features, expected = torso(x), plainly(torso, x)
    assert (features > 0).float().mean() > 0.1  # the comparison must not be of zeros
    torch.testing.assert_close(features.double(), expected, rtol=1e-4, atol=1e-5)

    parameters = list(torso.parameters())
    gradients = torch.autograd.grad((features * direction).sum(), parameters)
    reference = torch.autograd.grad((expected * direction).sum(), parameters)
    for mine, theirs in zip(gradients, reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [nature_2013, nature_2015])
def test_channels_last_equals_contiguous(make):
    fast, plain = made(make), made(make, channels_last=False)
    for p, q in zip(fast.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    torch.testing.assert_close(fast(frames(0, 4)), plain(frames(0, 4)), rtol=1e-5, atol=1e-5)


def test_weights_lie_as_asked():
    for channels_last, contiguous in ((True, False), (False, True)):
        for convolution in nature_2013(ATARI, channels_last=channels_last).convolutions:
            assert convolution.weight.is_contiguous(memory_format=torch.channels_last) == channels_last
            assert convolution.weight.is_contiguous() == contiguous


@pytest.mark.parametrize("make", [nature_2013, nature_2015])
def test_bfloat16_is_close_to_float32(make):
    """Eight bits of significand over four layers: 2% of the features' scale."""
    torso = made(make)
    small = copy.deepcopy(torso).to(torch.bfloat16)
    x = frames(3, 8)
    exact, rounded = torso(x), small(x)
    assert rounded.dtype == torch.bfloat16
    error = (exact - rounded.float()).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < 0.02

    exact.sum().backward()
    rounded.float().sum().backward()
    for p, q in zip(torso.parameters(), small.parameters(), strict=True):
        assert q.grad.dtype == torch.bfloat16
        error = (p.grad - q.grad.float()).norm() / p.grad.norm()
        assert error < 0.05


def test_any_batch_layout_is_read_alike():
    torso, x = made(nature_2013), frames(4, 6)
    expected = torso(x)
    torch.testing.assert_close(torso(x.contiguous(memory_format=torch.channels_last)), expected)
    torch.testing.assert_close(torso(x.repeat_interleave(2, 0)[::2]), expected)
    torch.testing.assert_close(torso(x[2:]), expected[2:])
    torch.testing.assert_close(torso(x.movedim(0, 3).contiguous().movedim(3, 0)), expected)


def test_observations_are_left_as_they_were():
    x = frames(5, 2)
    before = x.clone()
    made(nature_2013)(x).sum().backward()
    assert torch.equal(x, before)


def test_a_saved_torso_has_only_its_weights():
    names = {"convolutions.0", "convolutions.1", "linear"}
    assert set(nature_2013(ATARI).state_dict()) == {f"{n}.{p}" for n in names for p in ("weight", "bias")}


@pytest.mark.parametrize(
    "x", [frames(0, 2).float(), frames(0, 2)[0], frames(0, 2, (4, 84, 80)), frames(0, 2)[:, :3]]
)
def test_other_observations_are_refused(x):
    with pytest.raises(ValueError, match="uint8"):
        nature_2013(ATARI)(x)


def test_frames_smaller_than_the_filters_are_refused():
    with pytest.raises(ValueError, match="too small"):
        nature_2015((4, 32, 84))


@pytest.mark.parametrize("channels_last", [True, False])
def test_what_is_laid_once_serves_as_the_frames_do(channels_last):
    torch.manual_seed(0)
    net = nature_2013((4, 84, 84), channels_last=channels_last)
    window = torch.randint(256, (3, 7, 84, 84), dtype=torch.uint8)
    for frames in (window[:, :4], window[:, 3:], window[:, 1:5].contiguous()):
        expected = net(frames.contiguous())
        assert torch.equal(net(frames), expected)
        assert torch.equal(net(net.preprocess(frames)), expected)
    with pytest.raises(ValueError, match="uint8"):
        net.preprocess(window[:, :4].float())
