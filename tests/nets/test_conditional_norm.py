"""Conditional batch normalisation against torch's, and over replicas against the joined batch."""

import pytest
import torch
from torch.nn import functional as F

from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.nets.conditional_norm import ConditionalBatchNorm
from murmurate.replicator.collectives import Group
from murmurate.replicator.gather import TensorExchange

CLASSES, CHANNELS = 3, 4


def made(dtype=torch.float64):
    norm = ConditionalBatchNorm(CHANNELS, CLASSES).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        norm.gain.normal_(1, 0.3, generator=generator)
        norm.shift.normal_(generator=generator)
    return norm


def batch(size=6, mean=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = mean + torch.randn(size, CHANNELS, 5, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (size,), generator=generator)


def expected(norm, x, label):
    normal = F.batch_norm(x, None, None, training=True)
    return normal * norm.gain[label][:, :, None, None] + norm.shift[label][:, :, None, None]


@pytest.mark.parametrize("gathered", [False, True])
def test_it_is_torchs_batch_norm_with_the_gain_and_shift_of_the_class(gathered):
    norm, (x, label) = made(), batch()
    if gathered:
        norm.gather = Group.of_one().gather
    torch.testing.assert_close(norm(x, label), expected(norm, x, label))
    x.requires_grad_()
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs = (x, norm.gain, norm.shift)
    own = torch.autograd.grad((norm(x, label) * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected(norm, x, label) * weights).sum(), inputs)
    torch.testing.assert_close(own, theirs)


def over_replicas(replicas, parts, weights):
    """Outputs, and gradients of the sum of all outputs by each replica's own input."""
    fabric = SimulatedFabric(replicas, seed=0, keep_log=False, coroutines="threads")

    def role(rank, member):
        norm, (x, label) = made(), parts[rank]
        norm.gather = Group(TensorExchange(member)).gather
        x = x.clone().requires_grad_()
        out = norm(x, label)
        gradients = torch.autograd.grad((out * weights[rank]).sum(), (x, norm.gain))
        return out.detach(), *gradients

    return fabric.run([lambda m, r=r: role(r, m) for r in range(replicas)])


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("mean", [0.5, 1e4])
def test_over_replicas_it_is_that_of_the_joined_batch(replicas, mean):
    x, label = batch(6 * replicas, mean)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parts = list(zip(x.chunk(replicas), label.chunk(replicas), strict=True))
    results = over_replicas(replicas, parts, weights.chunk(replicas))
    norm = made()
    x.requires_grad_()
    whole = norm(x, label)
    by_x, by_gain = torch.autograd.grad((whole * weights).sum(), (x, norm.gain))
    # of the joined batch, torch's own kernel loses digits too where the mean is large
    tolerance = {"rtol": 1e-12, "atol": 1e-12 * max(1, mean)}
    torch.testing.assert_close(torch.cat([r[0] for r in results]), whole, **tolerance)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), by_x, **tolerance)
    torch.testing.assert_close(sum(r[2] for r in results), by_gain, **tolerance)


def test_fixed_statistics_make_an_example_independent_of_its_batch():
    norm, (x, label) = made(), batch()
    norm.fix(*norm.statistics(x))
    torch.testing.assert_close(norm(x, label), expected(norm, x, label))
    torch.testing.assert_close(norm(x[:1], label[:1]), norm(x, label)[:1])
    assert {"mean", "variance"} <= norm.state_dict().keys()


def test_bfloat16_is_normalised_in_float32():
    norm, (x, label) = made(torch.float32), batch(64)
    x = x.float()
    with torch.autocast("cpu", torch.bfloat16):
        low = norm(x.bfloat16(), label)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), norm(x, label), rtol=0.02, atol=0.03)
