"""The nets of SN-GAN: their sizes for every size of image, and what sampling relies on."""

import pytest
import torch

from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.losses.adversarial import generator_hinge
from murmurate.nets.sn_gan import Discriminator, Generator, layout
from murmurate.replicator.collectives import Group
from murmurate.replicator.gather import TensorExchange

CLASSES = 3


def generator_of(shape=(1, 8, 8), channels=8, spectral=True, seed=0):
    return Generator(
        shape,
        CLASSES,
        channels=channels,
        latent=5,
        spectral=spectral,
        generator=torch.Generator().manual_seed(seed),
    )


def inputs(size, seed=0, latent=5):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(size, latent, generator=generator)
    return noise, torch.randint(CLASSES, (size,), generator=generator)


@pytest.mark.parametrize(
    ("side", "first", "generator", "discriminator", "halvings"),
    [
        (28, 7, (256, 256, 256), (128,) * 4, 2),
        (32, 4, (256,) * 4, (128,) * 4, 2),
        (48, 6, (256,) * 4, (128,) * 4, 2),
        (64, 4, (1024, 512, 256, 128, 64), (64, 128, 256, 512, 1024), 4),
        (128, 4, (1024, 1024, 512, 256, 128, 64), (64, 128, 256, 512, 1024, 1024), 5),
    ],
)
def test_the_papers_layouts(side, first, generator, discriminator, halvings):
    assert layout(side, side, 256) == ((first, first), generator, discriminator, halvings)


@pytest.mark.parametrize("sides", [(30, 30), (7, 7), (9, 9), (4, 4), (32, 128), (31, 32)])
def test_sides_that_do_not_fit_are_refused_with_some_that_do(sides):
    with pytest.raises(ValueError, match=r"4 to 7 times the same power of two.*resize"):
        layout(*sides, 64)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 8, 12), (3, 64, 64), (1, 128, 128)])
def test_images_have_the_shape_of_the_data_and_get_a_score_each(shape):
    generator = generator_of(shape, channels=4)
    images = generator(*inputs(2))
    assert images.shape == (2, *shape)
    assert images.abs().max() <= 1
    net = Discriminator(shape, CLASSES, channels=4, generator=torch.Generator().manual_seed(0))
    assert net(images, inputs(2)[1]).shape == (2,)


def test_nets_follow_from_their_seed_and_not_from_torchs():
    one = generator_of()
    torch.manual_seed(123)
    other = generator_of()
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(generator_of(seed=1).last.layer.weight, one.last.layer.weight)


def test_class_and_noise_both_matter():
    generator = generator_of()
    for norm in generator.norms:
        torch.nn.init.normal_(norm.gain, generator=torch.Generator().manual_seed(3))
    noise, label = inputs(4)
    images = generator(noise, label)
    assert not torch.allclose(images, generator(noise, (label + 1) % CLASSES))
    assert not torch.allclose(images, generator(noise.flip(0), label))
    net = Discriminator((1, 8, 8), CLASSES, channels=8, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(net(images, label), net(images, (label + 1) % CLASSES))


def test_the_discriminator_is_linear_in_its_projection():
    """psi(h) + V_y . h (Miyato and Koyama 2018, eq. 3), with the weights as they are normalised."""
    net = Discriminator((1, 8, 8), CLASSES, channels=8, generator=torch.Generator().manual_seed(0))
    images, label = generator_of()(*inputs(4)), inputs(4)[1]
    x = images
    for block in net.blocks:
        x = block(x)
    h = torch.relu(x).sum((2, 3))
    v = net.classes.layer.weight / torch.linalg.matrix_norm(net.classes.layer.weight, 2)
    psi = net.score.layer.weight / torch.linalg.matrix_norm(net.score.layer.weight, 2)
    expected = h @ psi[0] + net.score.layer.bias + (v[label] * h).sum(1)
    torch.testing.assert_close(net(images, label), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("spectral", [True, False])
def test_a_frozen_generator_makes_the_same_image_whatever_is_beside_it(spectral):
    generator = generator_of(spectral=spectral)
    state = {name: x.clone() for name, x in generator.state_dict().items()}
    frozen = generator.frozen([inputs(32, seed) for seed in range(4)])
    noise, label = inputs(8, 99)
    images = frozen(noise, label)
    torch.testing.assert_close(frozen(noise[:1], label[:1]), images[:1])
    assert not torch.allclose(generator(noise[:1], label[:1]), generator(noise, label)[:1])
    assert all(torch.equal(x, state[name]) for name, x in generator.state_dict().items()), "it is a copy"
    assert not any("u" in name.split(".") for name in frozen.state_dict())
    # of one batch, its own statistics
    again = generator.frozen([(noise, label)])
    torch.testing.assert_close(again(noise, label), generator(noise, label), rtol=1e-3, atol=1e-3)


def test_a_generator_with_statistics_over_replicas_can_be_frozen():
    def role(member):
        net = generator_of()
        net.normalize_over(Group(TensorExchange(member)).gather)
        frozen = net.frozen([inputs(8, member.rank)])
        assert all(norm.gather is not None for norm in net.norms)
        return frozen(*inputs(2)).detach()

    for rank, images in enumerate(SimulatedFabric(2, seed=0, coroutines="threads").run([role] * 2)):
        # by the statistics of its own batch: others may not freeze theirs
        torch.testing.assert_close(images, generator_of().frozen([inputs(8, rank)])(*inputs(2)))


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_mean_gradient_of_replicas_is_that_of_the_joined_batch(replicas):
    """With batch statistics over all replicas, so the total batch alone matters."""
    noise, label = inputs(4 * replicas)
    noise = noise.double()

    def gradients(net, noise, label):
        loss = generator_hinge(discriminator(net(noise, label), label))
        return torch.autograd.grad(loss, list(net.parameters()))

    discriminator = Discriminator((1, 8, 8), CLASSES, channels=8, generator=torch.Generator().manual_seed(1))
    discriminator.double()
    whole = gradients(generator_of().double(), noise, label)

    def role(member):
        net = generator_of().double()
        net.normalize_over(Group(TensorExchange(member)).gather)
        own = slice(member.rank, None, replicas)
        return gradients(net, noise[own], label[own])

    fabric = SimulatedFabric(replicas, seed=0, keep_log=False, coroutines="threads")
    parts = fabric.run([role] * replicas)
    for expected, *found in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.stack(found).mean(0), expected, rtol=1e-10, atol=1e-12)
