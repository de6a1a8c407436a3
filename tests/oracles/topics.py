"""Latent Dirichlet allocation in float64, a document and a word at a time."""

from __future__ import annotations

import torch


def folded(documents, log_beta, alpha, *, iterations, tolerance):
    """(gamma [G, K], statistics [R, K]) of Hoffman et al. 2013, figure 6, lines 5 to 8."""
    log_beta, alpha = log_beta.double(), alpha.double()
    gammas, statistics = [], torch.zeros_like(log_beta)
    for words, times in _each(documents):
        gamma = torch.ones_like(alpha) if len(words) else alpha.clone()
        for _ in range(iterations if len(words) else 0):
            phi = _phi(gamma, log_beta, words)
            before, gamma = gamma, alpha + (times[:, None] * phi).sum(0)
            if (gamma - before).abs().mean() < tolerance:
                break
        gammas.append(gamma)
        if len(words):
            statistics.index_add_(0, words, times[:, None] * _phi(gamma, log_beta, words))
    return torch.stack(gammas), statistics


def bound(documents, log_beta, alpha, gamma):
    """[G] E[log p(w, z, theta) - log q(z, theta)] of each document, with phi written out."""
    log_beta, alpha, gamma = log_beta.double(), alpha.double(), gamma.double()
    values = []
    for g, (words, times) in zip(gamma, _each(documents), strict=True):
        log_theta = torch.digamma(g) - torch.digamma(g.sum())
        value = torch.zeros((), dtype=torch.float64)
        if len(words):
            phi = _phi(g, log_beta, words)
            value = (times[:, None] * phi * (log_theta + log_beta[words] - torch.log(phi))).nansum()
        theta = torch.distributions.Dirichlet(alpha), torch.distributions.Dirichlet(g)
        values.append(value - torch.distributions.kl_divergence(theta[1], theta[0]))
    return torch.stack(values)


def _phi(gamma, log_beta, words):
    """[n, K]"""
    return torch.softmax(torch.digamma(gamma) + log_beta[words], 1)


def _each(documents):
    for first, last in zip(documents.starts[:-1].tolist(), documents.starts[1:].tolist(), strict=True):
        yield documents.word[first:last].long(), documents.counts[first:last].double()
