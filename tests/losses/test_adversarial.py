"""The hinge losses: a table of literals, an oracle in the paper's notation, the gradient at the kink."""

import pytest
import torch

from murmurate.losses.adversarial import discriminator_hinge, generator_hinge


@pytest.mark.parametrize(
    ("real", "fake", "loss"),
    [
        ([2.0], [-2.0], 0.0),  # both beyond their margins
        ([1.0], [-1.0], 0.0),  # on them
        ([0.0], [0.0], 2.0),
        ([-1.0], [1.0], 4.0),
        ([3.0, 0.5], [-3.0, 0.0, 1.0], (0 + 0.5) / 2 + (0 + 1 + 2) / 3),
    ],
)
def test_discriminator_table(real, fake, loss):
    assert discriminator_hinge(torch.tensor(real), torch.tensor(fake)).item() == pytest.approx(loss)


def test_generator_table():
    assert generator_hinge(torch.tensor([1.0, -4.0])).item() == 1.5


def oracle(real, fake):
    """Miyato et al. 2018, eq. 17 with its sign turned, one image at a time."""
    of_real = sum(-min(0.0, -1.0 + d) for d in real.tolist()) / len(real)
    of_fake = sum(-min(0.0, -1.0 - d) for d in fake.tolist()) / len(fake)
    return of_real + of_fake


@pytest.mark.parametrize("seed", range(20))
def test_discriminator_is_the_papers(seed):
    generator = torch.Generator().manual_seed(seed)
    real = 2 * torch.randn(seed + 1, generator=generator, dtype=torch.float64)
    fake = 2 * torch.randn(2 * seed + 1, generator=generator, dtype=torch.float64)
    assert discriminator_hinge(real, fake).item() == pytest.approx(oracle(real, fake), rel=1e-12)


def test_gradients_beside_the_kinks():
    real = torch.tensor([-1.0, 0.9, 1.1, 3.0], dtype=torch.float64, requires_grad=True)
    fake = torch.tensor([1.0, -0.9, -1.1, -3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(discriminator_hinge, (real, fake))
    assert torch.autograd.gradcheck(generator_hinge, (fake,))


def test_an_image_on_its_margin_gives_no_gradient():
    real = torch.tensor([1.0, 1.0 - 1e-6], requires_grad=True)
    fake = torch.tensor([-1.0, -1.0 + 1e-6], requires_grad=True)
    discriminator_hinge(real, fake).backward()
    assert real.grad.tolist() == [0.0, -0.5]
    assert fake.grad.tolist() == [0.0, 0.5]


def test_scores_are_a_list():
    with pytest.raises(ValueError, match="d_fake must have 1 dimensions"):
        discriminator_hinge(torch.zeros(3), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="d_fake"):
        generator_hinge(torch.zeros(()))
