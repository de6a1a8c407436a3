"""The statistics of Gaussian mixtures: their meaning, and invalid tables."""

from __future__ import annotations

import pytest
import torch

from murmurate.losses.mixture import (
    Prior,
    distances,
    divergence,
    log_joint,
    posterior,
    statistics,
    width_of,
)

PRIORS = {
    "full": Prior(0.5, 2.0, 5.0, torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)),
    "diagonal": Prior(0.5, 2.0, 5.0, torch.tensor([2.0, 1.0], dtype=torch.float64)),
}
ROWS = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5], [-2.0, 4.0]], dtype=torch.float64)
SHARE = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.25, 0.75], [0.0, 1.0]], dtype=torch.float64)


def learned(kind):
    return posterior(statistics(ROWS, SHARE, kind == "full"), PRIORS[kind])


def test_statistics_are_counts_sums_and_products():
    assert (width_of(2, True), width_of(2, False), width_of(5, True)) == (6, 5, 21)
    first = statistics(ROWS, SHARE, True)[0].tolist()
    # 1 + 0.5 + 0.25 rows; then x and y; then x x, x y, y y
    assert first == [1.75, 2.625, 1.625, 5.5625, 0.5625, 4.5625]
    assert statistics(ROWS, SHARE, False)[0].tolist() == [1.75, 2.625, 1.625, 5.5625, 4.5625]


@pytest.mark.parametrize("kind", sorted(PRIORS))
def test_from_parameters_to_distances_and_precisions(kind):
    q, prior = learned(kind), PRIORS[kind]
    assert q.alpha.tolist() == [2.25, 2.75]
    assert q.beta.tolist() == [3.75, 4.25]
    assert q.nu.tolist() == [6.75, 7.25]
    torch.testing.assert_close(q.mean[0], torch.tensor([0.7, 1.625 / 3.75], dtype=torch.float64))
    scatter = q.scatter if kind == "full" else torch.diag_embed(q.scatter)
    inverse = torch.linalg.inv(scatter)
    away = ROWS[:, None] - q.mean
    torch.testing.assert_close(distances(ROWS, q), torch.einsum("gki,kij,gkj->gk", away, inverse, away))
    assert float(divergence(q, prior)) > 0
    assert log_joint(ROWS, q).shape == (4, 2)


@pytest.mark.parametrize("kind", sorted(PRIORS))
def test_half_of_a_change_is_still_a_distribution(kind):
    """The sum has been written and the products have not yet: less than nothing is left of the scatter."""
    table = statistics(ROWS, SHARE, kind == "full")
    table[0, 1:3] *= 50
    table[1, 0] = -1.0
    q = posterior(table, PRIORS[kind])
    assert q.alpha[1] == 0.5
    least = PRIORS[kind].scatter
    if kind == "full":
        assert (torch.linalg.eigvalsh(q.scatter - least) > -1e-9).all()
    else:
        assert (q.scatter >= least).all()
    assert torch.isfinite(log_joint(ROWS, q)).all()


def test_another_width_is_refused():
    with pytest.raises(ValueError, match="a row has 6 numbers, not 5"):
        posterior(torch.zeros(2, 5, dtype=torch.float64), PRIORS["full"])
