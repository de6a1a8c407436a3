"""SN-GAN: class-conditional image generation with a spectrally normalised discriminator, under any strategy.

Miyato et al. 2018; Miyato and Koyama 2018 (projection); Zhang et al. 2018, section 4 (hyper-parameters);
TF-Replicator, section 4.2 (one loss for each of two replicas, batch normalisation over replicas).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from murmurate.datasets.image_set import ImageBatch
from murmurate.losses.adversarial import discriminator_hinge, generator_hinge
from murmurate.nets.moving_average import MovingAverage
from murmurate.nets.precision import resolve_precision
from murmurate.nets.sn_gan import Discriminator, Generator
from murmurate.nets.spectral_norm import iterate_
from murmurate.ranges import NonNegativeFloat, PositiveInt, RepeatCount, UnitInterval
from murmurate.replica.adam import Adam
from murmurate.replica.vector import MakeOptimizer, Replica
from murmurate.replicator.collectives import Group
from murmurate.replicator.learner import Context, LearnerConfig
from murmurate.spec import Batch, EnvSpec, Examples, Outcome, derive_generator

# number and size of the batches from which the sampler's fixed batch-norm statistics are computed
_STANDING_BATCHES, _STANDING_BATCH = 8, 256
_SAMPLER_BATCH = 256  # images that the sampler makes at a time


@dataclass(frozen=True)
class SNGAN(LearnerConfig):
    """Hyper-parameters; the defaults are those of Zhang et al. 2018, without attention.

    batch: number of real images in an update of one replica; the same number is generated.
    channels: number of channels of the generator's feature maps; 256 gives the papers' nets
        (``nets.sn_gan.layout``), 64 a sixteenth of their work. latent: size of the noise.
    discriminator_steps: updates of the discriminator for each update of the generator (Miyato et al.: 5).
    generator_rate, discriminator_rate: learning rates of Adam. beta1, beta2: Adam's betas, for both nets.
    average_decay: decay of the moving average of the generator's parameters, with which samples are made.
    generator_norm: whether the generator is spectrally normalised too.
    batch_norm: statistics over the replica's own batch (``local``), or over the batches of all replicas
        (``replicas``). ``auto`` is ``replicas`` where gradients are averaged over the replicas, as under
        all-reduce, else ``local``.
    precision: precision of feature maps; ``auto`` is bfloat16 where the device is faster in it,
        else float32.
    """

    name: ClassVar[str] = "sn-gan"
    summary: ClassVar[str] = "class-conditional image generation, with spectral normalisation and projection"

    batch: PositiveInt = 64
    channels: PositiveInt = 256
    latent: PositiveInt = 128
    discriminator_steps: RepeatCount = 1
    generator_rate: NonNegativeFloat = 1e-4
    discriminator_rate: NonNegativeFloat = 4e-4
    beta1: UnitInterval = 0.0
    beta2: UnitInterval = 0.9
    average_decay: UnitInterval = 0.999
    generator_norm: bool = True
    batch_norm: Literal["auto", "replicas", "local"] = "auto"
    precision: Literal["float32", "bfloat16", "auto"] = "auto"

    @property
    def requires(self) -> Examples:
        return Examples(self.batch, "images")

    @property
    def collectives_in_backward(self) -> bool:
        return self.batch_norm != "local"

    def resolved(self, spec: EnvSpec, device: torch.device) -> SNGAN:
        return resolve_precision(self, device)

    def build(self, context: Context) -> SNGANLearner:
        """The learner. Raises ValueError for examples that are not uint8 images with classes, or whose sides
        the nets cannot generate; Refusal for statistics over replicas that do not wait for one another."""
        return SNGANLearner(self, context)


class ImageSampler:
    """Makes images of given classes, each independent of the others."""

    def __init__(self, net: Generator) -> None:
        self.net = net

    @torch.no_grad()
    def __call__(self, label: Tensor, generator: torch.Generator) -> Tensor:
        """Images [n, C, H, W] uint8 of classes [n] int64, on the CPU."""
        noise = torch.randn(len(label), self.net.latent, generator=generator)
        device = self.net.norm.gain.device
        batches = zip(torch.split(noise, _SAMPLER_BATCH), torch.split(label, _SAMPLER_BATCH), strict=True)
        return torch.cat([to_pixels(self.net(z.to(device), y.to(device))).cpu() for z, y in batches])


class SNGANLearner:
    """One replica's learner, whose two parameter vectors are ``generator`` and ``discriminator``.

    Its random numbers depend only on the run's seed, its rank and the number of the discriminator's updates,
    so no state of a random generator needs to be saved.
    """

    def __init__(self, config: SNGAN, context: Context) -> None:
        self.config = config = config.resolved(context.spec, context.device)
        self.spec, self.device = context.spec, context.device
        self._seed, self._rank = context.seed, context.rank
        shape, classes = context.spec.observation_shape, context.spec.actions
        if not context.spec.images or classes < 1:
            raise ValueError(f"{config.name} learns from uint8 images with classes, not {context.spec.name}")
        random = derive_generator(context.seed, "nets")
        self.generator = MovingAverage(
            Generator(
                shape,
                classes,
                channels=config.channels,
                latent=config.latent,
                spectral=config.generator_norm,
                generator=random,
            )
        ).to(context.device)
        self.discriminator = Discriminator(shape, classes, channels=config.channels, generator=random)
        self.discriminator.to(context.device)
        group = _group(config, context)
        self.generator.net.normalize_over(None if group is None else group.gather)
        self._generator = context.replicate("generator", self.generator, self._adam(config.generator_rate))
        self._discriminator = context.replicate(
            "discriminator", self.discriminator, self._adam(config.discriminator_rate)
        )
        self._generator_loss: Tensor | float = float("nan")

    def _adam(self, rate: float) -> MakeOptimizer:
        betas = (self.config.beta1, self.config.beta2)
        return lambda parameters: Adam(parameters, lr=rate, betas=betas)

    @property
    def replicas(self) -> dict[str, Replica]:
        return {"generator": self._generator, "discriminator": self._discriminator}

    # -- learning -----------------------------------------------------------------------------------

    def learn(self, batch: Batch) -> Outcome:
        """Update the discriminator, and after every ``discriminator_steps`` of its updates the generator."""
        data: ImageBatch = batch.data
        random = derive_generator(self._seed, f"noise of {self._rank}", self._discriminator.clock)
        metrics = self._update_discriminator(data, random)
        if self._discriminator.clock % self.config.discriminator_steps == 0:
            self._generator_loss = self._update_generator(len(data), random)
        return Outcome({**metrics, "generator_loss": self._generator_loss})

    def _update_discriminator(self, data: ImageBatch, random: torch.Generator) -> dict[str, Tensor]:
        real = to_values(data.images, random).to(self.device, memory_format=torch.channels_last)
        real_label = data.labels.to(self.device)
        noise, label = self._draw(len(data), random)
        iterate_(self.discriminator)
        with self._autocast():
            with torch.no_grad():
                fake = self.generator.net(noise, label).to(real.dtype)
            scores = self.discriminator(torch.cat([real, fake]), torch.cat([real_label, label]))
        d_real, d_fake = scores.chunk(2)
        loss = discriminator_hinge(d_real, d_fake)
        self._discriminator.descend(loss)
        return {
            "loss": loss.detach(),
            "real_score": d_real.detach().mean(),
            "fake_score": d_fake.detach().mean(),
        }

    def _update_generator(self, count: int, random: torch.Generator) -> Tensor:
        noise, label = self._draw(count, random)
        iterate_(self.generator.net)
        with self._autocast():
            d_fake = self.discriminator(self.generator.net(noise, label), label)
        loss = generator_hinge(d_fake)
        self._generator.descend(loss)
        self.generator.follow_(self.config.average_decay, self._generator.clock)
        return loss.detach()

    def _draw(self, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Noise [count, latent] and classes [count], all classes equally likely."""
        noise = torch.randn(count, self.config.latent, generator=random)
        label = torch.randint(self.spec.actions, (count,), generator=random)
        return noise.to(self.device), label.to(self.device)

    def _autocast(self) -> torch.autocast:
        is_bfloat16 = self.config.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=is_bfloat16)

    # -- sampling -----------------------------------------------------------------------------------

    def sampler(self) -> ImageSampler:
        """Makes images with a copy of the generator's present moving average: ``sampler().net`` is a plain
        module in float32, to keep or to export."""
        random = derive_generator(self._seed, "standing statistics")
        batches = [self._draw(_STANDING_BATCH, random) for _ in range(_STANDING_BATCHES)]
        return ImageSampler(self.generator.average.frozen(batches))

    def state(self) -> dict[str, Any]:
        return {"generator_loss": float(self._generator_loss)}

    def load(self, state: dict[str, Any]) -> None:
        self._generator_loss = state.get("generator_loss", float("nan"))


def to_values(images: Tensor, random: torch.Generator) -> Tensor:
    """Values in [-1, 1) of uint8 images [B, C, H, W], with uniform noise of one grey level added, as in
    Miyato et al."""
    noise = torch.empty(images.shape, memory_format=torch.channels_last).uniform_(generator=random)
    return (images + noise) / 128 - 1


def to_pixels(values: Tensor) -> Tensor:
    """The inverse of ``to_values``: uint8 images from values in (-1, 1)."""
    return ((values.float() + 1) * 128).clamp(0, 255).to(torch.uint8)


def _group(config: SNGAN, context: Context) -> Group | None:
    """The replicas that share batch statistics; None if each replica has its own."""
    if config.batch_norm == "local" or (config.batch_norm == "auto" and context.averaged == 1):
        return None
    group = context.group()
    return group if group.size > 1 else None
