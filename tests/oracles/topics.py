"""Latent Dirichlet allocation in float64, a document and a word at a time."""

from __future__ import annotations

import torch


def folded(documents, beta, alpha, *, iterations, tolerance):
    """(gamma [G, K], statistics [R, K]) of Hoffman et al. 2013, figure 6, lines 5 to 8."""
    beta, alpha = beta.double(), alpha.double()
    gammas, statistics = [], torch.zeros_like(beta)
    for words, times in _each(documents):
        gamma = torch.ones_like(alpha) if len(words) else alpha.clone()
        for _ in range(iterations if len(words) else 0):
            phi = _phi(gamma, beta, words)
            before, gamma = gamma, alpha + (times[:, None] * phi).sum(0)
            if (gamma - before).abs().mean() < tolerance:
                break
        gammas.append(gamma)
        if len(words):
            statistics.index_add_(0, words, times[:, None] * _phi(gamma, beta, words))
    return torch.stack(gammas), statistics


def bound(documents, beta, alpha, gamma):
    """[G] E[log p(w, z, theta) - log q(z, theta)] of each document, with phi written out."""
    beta, alpha, gamma = beta.double(), alpha.double(), gamma.double()
    values = []
    for g, (words, times) in zip(gamma, _each(documents), strict=True):
        log_theta = torch.digamma(g) - torch.digamma(g.sum())
        value = torch.zeros((), dtype=torch.float64)
        if len(words):
            phi = _phi(g, beta, words)
            value = (times[:, None] * phi * (log_theta + torch.log(beta[words]) - torch.log(phi))).nansum()
        theta = torch.distributions.Dirichlet(alpha), torch.distributions.Dirichlet(g)
        values.append(value - torch.distributions.kl_divergence(theta[1], theta[0]))
    return torch.stack(values)


def _phi(gamma, beta, words):
    """[n, K]"""
    weight = torch.exp(torch.digamma(gamma)) * beta[words]
    return weight / weight.sum(1, keepdim=True)


def _each(documents):
    for first, last in zip(documents.starts[:-1].tolist(), documents.starts[1:].tolist(), strict=True):
        yield documents.word[first:last].long(), documents.times[first:last].double()
