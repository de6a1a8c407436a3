"""Gradients through collectives, and collectives of groups, against those of the whole."""

from __future__ import annotations

import pytest
import torch

from murmurate.errors import Refusal
from murmurate.replicator.collectives import Group
from replicator.steps import close, draw, loops, processes, second_smallest, simulated

# -- gradients --------------------------------------------------------------------------------------

WEIGHTS = [1.0, -2.0, 0.5, 3.0]


def test_views_arrive_as_the_values_that_they_show():
    def script(loop):
        one = torch.tensor([3.0]).requires_grad_()
        loop.mean(one).sum().backward()  # the gradient of a sum is one number with stride 0
        conjugate = torch.tensor([1 + 2j]).conj()
        return one.grad, loop.sum(conjugate), loop.gather(conjugate.imag)

    for gradient, total, imaginary in loops(2, script):
        assert gradient.tolist() == [1.0]
        assert total.tolist() == [2 - 4j]
        assert imaginary.tolist() == [[-2.0], [-2.0]]


def own_input(rank):
    return draw(rank, 2, 3)


def loss_of(rank, mean, total, low, high, parts, root, second):
    """Uses everything, not linearly, with a weight of each member's own."""
    cubes = (parts * draw(60 + rank, 1, 2, 3)).pow(3).sum()
    mixed = (mean * total.sin()).sum() + (low * high).sum() + root.pow(2).sum() + second.exp().sum()
    return WEIGHTS[rank] * (mixed + cubes)


def gradient(loop):
    x = own_input(loop.rank).requires_grad_()
    y = x.tanh()
    loss = loss_of(
        loop.rank,
        loop.mean(y),
        loop.sum([y])[0],
        loop.reduce(y, "min"),
        loop.reduce(y, "max"),
        loop.gather(y),
        loop.broadcast(y, root=loop.size // 2),
        loop.reduce(y, second_smallest),
    )
    loss.backward()
    return x.grad


def whole_gradient(size):
    xs = [own_input(rank).requires_grad_() for rank in range(size)]
    ys = torch.stack([x.tanh() for x in xs])
    common = ys.mean(0), ys.sum(0), ys.min(0).values, ys.max(0).values, ys, ys[size // 2], second_smallest(ys)
    sum(loss_of(rank, *common) for rank in range(size)).backward()
    return [x.grad for x in xs]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_are_those_of_the_whole(size):
    for result, right in zip(loops(size, gradient), whole_gradient(size), strict=True):
        close(result, right)


def test_gradients_are_those_of_the_whole_on_real_processes():
    for result, right in zip(loops(2, gradient, processes), whole_gradient(2), strict=True):
        close(result, right)


def gradient_of_gradient(loop):
    x = own_input(loop.rank).requires_grad_()
    loss = WEIGHTS[loop.rank] * (loop.mean(x.pow(3)) * loop.sum(x) + loop.gather(x).pow(2).sum(0)).sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    slope.pow(2).sum().backward()
    return x.grad


def test_second_derivatives_go_through_too():
    """A gradient penalty: sum_i |d(sum of losses)/dx_i|^2."""
    size = 3
    x = torch.stack([own_input(rank) for rank in range(size)]).requires_grad_()
    loss = sum(w * (x.pow(3).mean(0) * x.sum(0) + x.pow(2).sum(0)).sum() for w in WEIGHTS[:size])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    slope.pow(2).sum().backward()
    close(torch.stack(loops(size, gradient_of_gradient)), x.grad)


def test_the_gradient_of_a_tie_goes_to_the_lowest_rank():
    def script(loop):
        x = torch.tensor([1.0, float(loop.rank)]).requires_grad_()
        (loop.reduce(x, "min").sum() + 10 * loop.reduce(x, "max").sum()).backward()
        return x.grad.tolist()

    assert loops(3, script) == [[33.0, 3.0], [0.0, 0.0], [0.0, 30.0]]


def test_a_member_whose_input_is_constant_helps_the_others_gradients():
    def script(loop):
        x = torch.tensor(2.0, requires_grad=loop.rank == 0)
        (loop.sum(x) * (1 + loop.rank)).backward()
        return None if x.grad is None else x.grad.item()

    assert loops(3, script) == [6.0, None, None]


def test_what_nobody_wants_a_gradient_of_has_none():
    def script(loop):
        with torch.no_grad():
            inside = loop.mean(torch.ones(2, requires_grad=True))
        return inside.requires_grad, loop.mean(torch.ones(2)).requires_grad

    assert loops(2, script) == [(False, False)] * 2


def norm(x, mean, eps=1e-5):
    """TF-Replicator's listing of batch normalisation, with its slip mended: sqrt(E x^2 - (E x)^2 + eps)."""
    centre, square = mean((x.mean(0), x.pow(2).mean(0)))
    return (x - centre) / (square - centre.pow(2) + eps).sqrt()


def normalised(loop):
    rows = draw(5, 12, 3)
    share = 12 // loop.size
    x = rows[loop.rank * share : (loop.rank + 1) * share].clone().requires_grad_()
    y = norm(x, loop.mean)
    (y * draw(6, 12, 3)[loop.rank * share : (loop.rank + 1) * share]).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_batch_normalisation_over_replicas_is_that_of_the_whole_batch(size):
    x = draw(5, 12, 3).requires_grad_()
    y = torch.nn.functional.batch_norm(x, None, None, training=True)
    (y * draw(6, 12, 3)).sum().backward()
    result = loops(size, normalised)
    close(torch.cat([one for one, _ in result]), y.detach())
    torch.testing.assert_close(torch.cat([g for _, g in result]), x.grad, rtol=1e-10, atol=1e-12)


# -- groups -----------------------------------------------------------------------------------------


def grouped(loop):
    x = draw(loop.rank, 3).requires_grad_()
    inner, outer = loop.within, loop.across
    y = inner.mean(x) * outer.sum(x.exp())
    (y.sum() * WEIGHTS[loop.rank]).backward()
    names = (loop.worker, inner.rank, outer.rank, inner.size, outer.size)
    return (
        y.detach(),
        x.grad,
        inner.broadcast(x.detach(), root=1),
        outer.gather(torch.tensor(loop.rank)),
        names,
    )


def test_groups_within_and_across_workers():
    """Ranks 0, 1 are worker 0 and ranks 2, 3 worker 1; across are 0, 2 and 1, 3."""
    xs = torch.stack([draw(rank, 3) for rank in range(4)]).requires_grad_()
    within = [xs[:2].mean(0), xs[:2].mean(0), xs[2:].mean(0), xs[2:].mean(0)]
    across = [xs[[r % 2, 2 + r % 2]].exp().sum(0) for r in range(4)]
    ys = [a * b for a, b in zip(within, across, strict=True)]
    sum(w * y.sum() for w, y in zip(WEIGHTS, ys, strict=True)).backward()
    result = loops(4, grouped, workers=2)
    for rank, (y, slope, root, ranks, names) in enumerate(result):
        close(y, ys[rank].detach())
        close(slope, xs.grad[rank])
        close(root, draw(1 if rank < 2 else 3, 3))
        assert ranks.tolist() == [rank % 2, 2 + rank % 2]
        assert names == (rank // 2, rank % 2, rank // 2, 2, 2)


def at_its_own_pace(loop):
    """Worker 0 makes three calls more than worker 1, and both then come to one of everybody."""
    x = torch.tensor(float(loop.rank))
    for _ in range(1 if loop.worker else 4):
        x = loop.within.sum(x)
    return x.item(), loop.mean(x).item(), loop.bytes_exchanged


@pytest.mark.parametrize("fabric", [simulated, processes])
def test_a_groups_calls_are_its_own(fabric):
    result = loops(4, at_its_own_pace, fabric, workers=2)
    assert [x for x, _, _ in result] == [8.0, 8.0, 5.0, 5.0]
    assert [mean for _, mean, _ in result] == [6.5] * 4
    first, _, last, _ = (exchanged for *_, exchanged in result)
    assert first > last > 0, "what groups exchange counts too"


def test_workers_divide_the_replicas():
    with pytest.raises(Refusal, match="3 replicas cannot be divided evenly among 2 workers"):
        loops(3, grouped, workers=2)


def test_a_group_of_one_gives_back_what_it_is_given_and_its_gradient() -> None:
    group = Group.of_one()
    assert (group.rank, group.size) == (0, 1)
    x = torch.randn(3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    results = [group.mean(x), group.sum(x), group.broadcast(x), group.gather(x)[0], group.reduce(x, "max")]
    for result in results:
        assert torch.equal(result, x)
        (gradient,) = torch.autograd.grad((3 * result).sum(), [x])
        assert torch.equal(gradient, torch.full((3,), 3.0))
    assert torch.equal(group.map_gather(torch.tensor, [1, 2]), torch.tensor([1, 2]))
