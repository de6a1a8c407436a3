"""Running moments against those of all samples at once; observations normalised by them."""

import pytest
import torch

from murmurate.nets.moments import ObservationNormalizer, RunningMoments


def draw(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def included(moments, samples):
    moments.include(samples.mean(0), samples.square().mean(0), len(samples))


@pytest.mark.parametrize(
    ("pieces", "mean", "variance"),
    [
        ([[1.0, 3.0]], 2.0, 1.0),
        ([[1.0, 3.0], [5.0]], 3.0, 8 / 3),
        ([[2.0], [2.0], [2.0]], 2.0, 0.0),
        ([[0.0], [6.0], [0.0, 6.0]], 3.0, 9.0),
    ],
)
def test_table(pieces, mean, variance):
    moments = RunningMoments(())
    assert (moments.mean.item(), moments.variance.item()) == (0.0, 1.0)
    for piece in pieces:
        included(moments, torch.tensor(piece).double())
    assert moments.mean.item() == pytest.approx(mean)
    assert moments.variance.item() == pytest.approx(variance)
    assert moments.count.item() == sum(map(len, pieces))


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("seed", range(3))
def test_pieces_of_any_size_give_the_moments_of_the_whole(seed, offset):
    samples = draw(seed, 500, 3) * torch.tensor([1.0, 10.0, 1e-2]).double() + offset
    moments = RunningMoments((3,))
    for piece in samples.split([1, 1, 98, 250, 150]):
        included(moments, piece)
    torch.testing.assert_close(moments.mean, samples.mean(0), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(moments.variance, samples.var(0, correction=0), rtol=2e-3, atol=0)


def test_observations_are_normalised_and_limited():
    net = ObservationNormalizer((2,), torch.float32)
    seen = torch.tensor([[3.0, -4.0], [100.0, 0.0]])
    assert torch.equal(net(seen), torch.tensor([[3.0, -4.0], [10.0, 0.0]])), "as they are, before the first"
    samples = 5 + 2 * draw(0, 4000, 2)
    included(net.moments, samples)
    out = net(samples.float())
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.mean(0), torch.zeros(2), rtol=0, atol=1e-4)
    torch.testing.assert_close(out.std(0, correction=0), torch.ones(2), rtol=1e-4, atol=0)
    assert net(torch.tensor([[1e6, -1e6]])).tolist() == [[10.0, -10.0]]


def test_a_constant_observation_stays_finite():
    net = ObservationNormalizer((1,), torch.float32)
    included(net.moments, torch.full((9, 1), 3.0).double())
    assert net(torch.tensor([[3.0]])).item() == 0.0
    assert net(torch.tensor([[4.0]])).item() == 10.0


def test_forward_changes_nothing_and_the_state_holds_all():
    net, other = ObservationNormalizer((2,), torch.float32), ObservationNormalizer((2,), torch.float32)
    included(net.moments, draw(1, 50, 2))
    before = {name: x.clone() for name, x in net.named_buffers()}
    net(draw(2, 7, 2).float())
    assert all(torch.equal(before[name], x) for name, x in net.named_buffers())
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(torch.ones(1, 2)), net(torch.ones(1, 2)))
    assert not list(net.parameters())


def test_images_are_refused():
    with pytest.raises(ValueError, match="images"):
        ObservationNormalizer((4, 84, 84), torch.uint8)
