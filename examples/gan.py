"""A small GAN on a ring of points, two losses and two optimizers: a plain PyTorch script."""

import math
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

BATCH, NOISE = 48, 4


def networks():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    judge = [spectral_norm(nn.Linear(i, o)) for i, o in ((2, 32), (32, 32), (32, 1))]
    return generator, nn.Sequential(judge[0], nn.LeakyReLU(0.1), judge[1], nn.LeakyReLU(0.1), judge[2])


def batches(count, seed):
    """Points near a circle, and noise for each of the two steps."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(count):
        angle = 2 * math.pi * torch.rand(BATCH, generator=rng)
        real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(BATCH, 2, generator=rng)
        yield real, torch.randn(BATCH, NOISE, generator=rng), torch.randn(BATCH, NOISE, generator=rng)


def main(steps=400):
    generator, discriminator = networks()
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.0, 0.9))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    for real, noise, more_noise in batches(steps, seed=1):
        d_optimizer.zero_grad()
        d_loss = F.relu(1 - discriminator(real)).mean()
        d_loss = d_loss + F.relu(1 + discriminator(generator(noise).detach())).mean()
        d_loss.backward()
        d_optimizer.step()

        g_optimizer.zero_grad()
        g_loss = -discriminator(generator(more_noise)).mean()
        g_loss.backward()
        g_optimizer.step()
    radius = generator(more_noise).norm(dim=1)
    print(f"losses {d_loss.item():.3f} {g_loss.item():.3f}, radius {radius.mean().item():.2f}")
    return [p.detach() for net in (generator, discriminator) for p in net.parameters()]


if __name__ == "__main__":
    main()
