"""Spectral normalisation: a layer's weight divided by an estimate of its largest singular value."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FIRST_ITERATIONS = 16  # power iterations after ``u`` has been drawn
_LEAST = 1e-12  # smaller norms are replaced by this one


class SpectralNorm(nn.Module):
    """``layer`` (linear, embedding or convolution) with weight W / sigma(W), where W is the matrix [outputs,
    everything else] and sigma its largest singular value, estimated by power iteration.

    Source: Miyato et al. 2018, section 2.1 and Algorithm 1. ``u`` [outputs] is the estimate of the first left
    singular vector, a buffer; ``start_`` draws it, and must be called before the first use. sigma is |W^T u|,
    which is u^T W v for v = W^T u / |W^T u|, and its gradient is u v^T as in the paper's eq. 9 (where ``u``
    is a constant). Differs: an iteration is made when ``iterate_`` is called, not in each forward pass, so
    that replicas with equal parameters make equally many iterations and have the same ``u``.

    torch's own parametrization is not used: it draws ``u`` from the global generator and iterates in each
    forward pass of a module in training mode.
    """

    u: Tensor

    def __init__(self, layer: nn.Conv2d | nn.Linear | nn.Embedding) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("u", torch.ones(layer.weight.shape[0], dtype=layer.weight.dtype))

    def matrix(self) -> Tensor:
        """W [outputs, everything else], its columns in the order of a channels-last weight."""
        weight = self.layer.weight
        return weight.permute(0, 2, 3, 1).flatten(1) if weight.dim() == 4 else weight

    def sigma(self) -> Tensor:
        """The estimate of the largest singular value, a scalar; differentiable."""
        norm: Tensor = torch.linalg.vector_norm(self.matrix().T @ self.u)
        return norm.clamp(min=_LEAST)

    @torch.no_grad()
    def iterate_(self) -> None:
        """One power iteration."""
        w = self.matrix().detach()
        v = F.normalize(w.T @ self.u, dim=0, eps=_LEAST)
        self.u.copy_(F.normalize(w @ v, dim=0, eps=_LEAST))

    @torch.no_grad()
    def start_(self, generator: torch.Generator) -> None:
        """Draw ``u``, and iterate a few times."""
        if self.u.is_meta:  # a net that is built for its sizes alone
            return
        self.u.copy_(torch.randn(len(self.u), generator=generator))
        for _ in range(_FIRST_ITERATIONS):
            self.iterate_()

    @torch.no_grad()
    def normalized(self) -> nn.Module:
        """The layer itself, its weight now divided by the exact largest singular value."""
        self.layer.weight /= torch.linalg.matrix_norm(self.matrix().double(), 2).clamp(min=_LEAST)
        return self.layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight = self.layer.weight / self.sigma()
        layer = self.layer
        if isinstance(layer, nn.Conv2d):
            return F.conv2d(x, weight, layer.bias, layer.stride, layer.padding)
        if isinstance(layer, nn.Embedding):
            return F.embedding(x, weight)
        return F.linear(x, weight, layer.bias)


def iterate_(module: nn.Module) -> None:
    """One power iteration of every spectral normalisation below ``module``."""
    for part in module.modules():
        if isinstance(part, SpectralNorm):
            part.iterate_()


def normalized(module: nn.Module) -> nn.Module:
    """``module`` with plain layers in place of its spectral normalisations, their weights divided by the
    exact largest singular values. Changes ``module`` in place; for a ``SpectralNorm`` returns its layer."""
    if isinstance(module, SpectralNorm):
        return module.normalized()
    for name, child in module.named_children():
        setattr(module, name, normalized(child))
    return module
