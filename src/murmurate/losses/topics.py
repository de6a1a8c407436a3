"""Latent Dirichlet allocation: expected topics, and the variational E-step over documents.

Hoffman et al. 2013, section 3.2; Mohamad et al., equations 44 to 52. A matrix of topics is word-major, [V,
W]: one row for each word, of which the first K numbers are used and the others are 0; W is K rounded up to
a multiple of 16, so that each row fills whole cache lines. The compiled kernels are used where the extension
was built; the equivalent torch code also runs on a GPU.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from murmurate.losses.checks import check_kind, check_rank, check_shape
from murmurate.native import kernels

LANES = 16  # float32 numbers in a cache line


def width_for(topics: int) -> int:
    """W, how many numbers a row has for K topics."""
    return -(-topics // LANES) * LANES


@dataclass(frozen=True)
class Documents:
    """A mini-batch of G documents, whose words are indices of rows of a matrix of topics.

    starts: [G + 1] int64. Document g has the entries ``starts[g]:starts[g + 1]`` of ``word`` and ``counts``.
    word: [N] int32, rows of the matrix. counts: [N] float32, how often each word occurs in its document.
    """

    starts: Tensor
    word: Tensor
    counts: Tensor

    def __len__(self) -> int:
        return self.starts.numel() - 1


def check_starts(documents: Documents) -> None:
    """Raise ValueError unless ``starts`` divides all words among the documents."""
    starts = documents.starts
    increasing = len(starts) and not bool((starts.diff() < 0).any())
    if not increasing or int(starts[0]) != 0 or int(starts[-1]) != len(documents.word):
        raise ValueError("starts must increase from 0 to the number of words")


def expected_topics(
    x: Tensor, row: Tensor, total: Tensor, *, topics: int, prior: float, scale: float = 1.0
) -> Tensor:
    """exp(E[log beta]) of some words, up to a factor for each word, where lambda is ``prior + scale * x``.

    Source: Hoffman et al. 2013, figure 6: exp(psi(lambda_kv) - psi(sum_v lambda_kv)). The factor makes a
    row's greatest number 1/2 or more: a word that never occurred, with a prior of 0.01, would otherwise have
    exp(-100), which is 0 in float32, in all topics. The E-step's phi does not depend on the factor. The
    compiled kernel computes the ratio of each number to the greatest of its row with a relative error of at
    most 4e-6 for ratios down to exp(-10), and 3e-5 down to exp(-80), however small lambda is; ratios below
    exp(-87) are 0.

    Args:
        x: [V, W] float32, not negative; 0 from column K on.
        row: [R] int64, the words, as rows of x.
        total: [W] float64, the sum of lambda over all words.
        topics: K.

    Returns:
        [R, W]; 0 from column K on.

    Raises:
        ValueError: on a wrong rank, shape or dtype, a word outside x, or more topics than columns.
    """
    check_rank(2, x=x)
    check_rank(1, row=row, total=total)
    check_shape(x.shape[1:], "a row", total=total)
    check_kind(torch.int64, row=row)
    if len(row) and not 0 <= int(row.min()) <= int(row.max()) < len(x):
        wrong = int(row.min()) if int(row.min()) < 0 else int(row.max())
        raise ValueError(f"there is no word {wrong}: x has {len(x)} words")
    if topics > x.shape[1]:
        raise ValueError(f"topics is {topics}, but a row of x has {x.shape[1]} numbers")
    prior = max(prior, _TINY)
    log_total = torch.digamma(total[:topics])
    if kernels is None or not _fits_kernels(x):
        beta = torch.zeros(len(row), x.shape[1], device=x.device)
        beta[:, :topics] = _relative(torch.digamma(prior + scale * x[row, :topics].double()) - log_total)
        return beta
    factor = x.new_zeros(x.shape[1])
    factor[:topics] = torch.exp((log_total.max() - log_total).clamp(max=_MOST_LOG))
    row = row.contiguous()
    beta = x.new_empty(len(row), x.shape[1])
    kernels.expected_topics(
        x.data_ptr(), x.shape[1], topics, row.data_ptr(), len(row), scale, prior,
        factor.data_ptr(), beta.data_ptr(),
    )  # fmt: skip
    return beta


class FoldedIn(NamedTuple):
    """The result of the E-step.

    gamma: [G, W], parameters of the Dirichlet over each document's topics. statistics: [R, W], expected
    counts of words in topics. iterations: total over all documents.
    """

    gamma: Tensor
    statistics: Tensor
    iterations: int


def fold_in(
    documents: Documents,
    beta: Tensor,
    alpha: Tensor,
    *,
    topics: int,
    iterations: int = 20,
    tolerance: float = 1e-3,
    gamma: Tensor | None = None,
) -> FoldedIn:
    """The documents' variational parameters at their fixed point, given the topics (the E-step).

    Source: Hoffman et al. 2013, figure 6: phi_gwk proportional to exp(psi(gamma_gk)) beta_wk, and gamma_gk =
    alpha_k + sum_w n_gw phi_gwk; Mohamad et al., equation 44. A document has converged when its gammas change
    by less than ``tolerance`` on average. Statistics are sum_g n_gw phi_gwk, equation 52 without its factor
    n / G.

    Args:
        beta: exp(E[log beta]) [R, W] of the batch's words, up to a factor for each word; 0 from column K on.
            A word is ignored if its row, with the factor, is below 1e-30 in all topics of a document
            (``expected_topics`` chooses a suitable factor).
        alpha: [W] float32; ignored from K on.
        topics: K.
        iterations: maximum for each document.
        gamma: [G, W] initial values; None: 1.

    Raises:
        ValueError: on a wrong rank, shape or dtype, a word without a row, or ``starts`` that do not divide
            the words.
    """
    check_rank(2, beta=beta)
    check_rank(1, alpha=alpha, starts=documents.starts, word=documents.word, counts=documents.counts)
    check_shape(beta[0].shape if len(beta) else alpha.shape, "a row of beta", alpha=alpha)
    check_shape(documents.word.shape, "word", counts=documents.counts)
    check_starts(documents)
    check_kind(torch.int64, starts=documents.starts)
    check_kind(torch.int32, word=documents.word)
    check_kind(torch.float32, counts=documents.counts)
    if gamma is not None:
        check_shape(torch.Size((len(documents), len(alpha))), "documents and topics", gamma=gamma)
    if len(documents.word) and not 0 <= int(documents.word.min()) <= int(documents.word.max()) < len(beta):
        raise ValueError(f"a word has no row: beta has {len(beta)} rows")
    gamma = torch.ones(len(documents), len(alpha), device=beta.device) if gamma is None else gamma.clone()
    statistics = torch.zeros_like(beta)
    if not len(documents.word):
        return FoldedIn(alpha.expand_as(gamma).clone(), statistics, 0)
    if kernels is None or not _fits_kernels(beta):
        return _fold_in(documents, beta, alpha, topics, iterations, tolerance, gamma)
    starts, word, counts = (
        part.contiguous() for part in (documents.starts, documents.word, documents.counts)
    )
    gamma = gamma.float().contiguous()
    padded_alpha = alpha.float().clone()
    padded_alpha[topics:] = gamma[:, topics:] = _TINY  # exp(digamma) of it is 0, and that of 0 is undefined
    iterations = kernels.fold_in(
        starts.data_ptr(), word.data_ptr(), counts.data_ptr(), len(documents), beta.data_ptr(), beta.shape[1],
        topics, padded_alpha.data_ptr(), iterations, tolerance, gamma.data_ptr(), statistics.data_ptr(),
    )  # fmt: skip
    gamma[starts[1:] == starts[:-1]] = alpha
    return FoldedIn(gamma, statistics, iterations)


_PIECE = 1 << 14  # entries of documents whose rows are gathered at a time
_TINY = torch.finfo(torch.float32).tiny
_LEAST = 1e-30  # as in the compiled kernel: avoids a division by 0 for a word that no topic has
_MOST_LOG = 30.0  # limit of a logarithm, since the total of a topic without words may be near 0


def _fold_in(
    documents: Documents,
    beta: Tensor,
    alpha: Tensor,
    topics: int,
    iterations: int,
    tolerance: float,
    gamma: Tensor,
) -> FoldedIn:
    """``fold_in`` in torch: all documents at once; converged documents do not change any more."""
    starts, columns = documents.starts, documents.word.long()
    shape = len(documents), len(beta)
    lengths = starts.diff()
    active = lengths > 0
    total_iterations = 0

    def weights() -> Tensor:
        theta = torch.zeros_like(gamma)
        theta[:, :topics] = _relative(torch.digamma(gamma[:, :topics].double()))
        return theta

    def ratios(theta: Tensor) -> Tensor:
        return documents.counts / (_dots(starts, columns, theta, beta, shape) + _LEAST)

    for _ in range(iterations):
        if not bool(active.any()):
            break
        theta = weights()
        new_gamma = alpha + theta * (_csr(starts, columns, ratios(theta), shape) @ beta)
        change = (new_gamma - gamma)[:, :topics].abs().sum(1)
        total_iterations += int(active.sum())
        gamma = torch.where(active[:, None], new_gamma, gamma)
        active = active & (change >= tolerance * topics)
    theta = weights()
    document = torch.repeat_interleave(torch.arange(shape[0], device=beta.device), lengths)
    shares = torch.sparse_coo_tensor(
        torch.stack([columns, document]), ratios(theta), shape[::-1], check_invariants=False
    )
    statistics = beta * torch.sparse.mm(shares, theta)
    gamma[lengths == 0] = alpha
    return FoldedIn(gamma, statistics, total_iterations)


def _relative(log: Tensor) -> Tensor:
    """exp(log), each row divided by its greatest number, float32."""
    return torch.exp(log - log.amax(1, keepdim=True)).float()


def _dots(starts: Tensor, columns: Tensor, theta: Tensor, beta: Tensor, shape: tuple[int, int]) -> Tensor:
    """[N]: for each entry the inner product of its document's theta and its word's beta."""
    zeros = _csr(starts, columns, torch.zeros(len(columns), device=beta.device), shape)
    try:
        products: Tensor = torch.sparse.sampled_addmm(zeros, theta, beta.t(), beta=0.0).values()
        return products
    except RuntimeError:  # a torch without MKL
        document = torch.repeat_interleave(torch.arange(shape[0], device=beta.device), starts.diff())
        return torch.cat(
            [(theta[document[piece]] * beta[columns[piece]]).sum(1) for piece in pieces(len(columns))]
        )


def _csr(starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


def pieces(count: int) -> list[slice]:
    """Slices of 0..count of bounded length, which bound the memory of gathered rows."""
    return [slice(start, start + _PIECE) for start in range(0, count, _PIECE)]


def _fits_kernels(x: Tensor) -> bool:
    """Whether the compiled kernels accept ``x``."""
    rows = x.is_contiguous() and x.shape[1] % LANES == 0
    return x.device.type == "cpu" and x.dtype == torch.float32 and rows


def document_bound(
    documents: Documents, log_beta: Tensor, alpha: Tensor, gamma: Tensor, *, topics: int
) -> Tensor:
    """[G] float64: each document's part of the evidence lower bound, with the best phi for ``gamma``.

    Source: Hoffman et al. 2010, equation 3 with phi from equation 5: sum_w n_w log sum_k exp(E[log theta_k] +
    E[log beta_kw]) + E[log p(theta | alpha) - log q(theta | gamma)].

    The arguments are those of ``fold_in``, except log_beta: E[log beta] [R, K] float64, without factors.
    """
    g, a = gamma[:, :topics].double(), alpha[:topics].double()
    log_theta = torch.digamma(g) - torch.digamma(g.sum(1, keepdim=True))
    document = torch.repeat_interleave(torch.arange(len(documents), device=g.device), documents.starts.diff())
    log_likelihood = torch.zeros(len(documents), dtype=torch.float64, device=g.device)
    for piece in pieces(len(document)):
        log = torch.logsumexp(log_theta[document[piece]] + log_beta[documents.word[piece].long()], 1)
        log_likelihood.index_add_(0, document[piece], documents.counts[piece].double() * log)
    log_p = torch.lgamma(a.sum()) - torch.lgamma(a).sum() + ((a - 1) * log_theta).sum(1)
    log_q = torch.lgamma(g.sum(1)) - torch.lgamma(g).sum(1) + ((g - 1) * log_theta).sum(1)
    return log_likelihood + log_p - log_q
