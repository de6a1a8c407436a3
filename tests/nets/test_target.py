"""When target networks move, and how far."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from murmurate.nets.target import TargetNetwork
from murmurate.replica.vector import Exchange


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def changed(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)


def rounds(period: int, updates: int) -> list[Exchange]:
    """What a strategy that agrees every ``period`` updates answers."""
    return [Exchange(n // period, 2, n % period) for n in range(1, updates + 1)]


@pytest.mark.parametrize(
    ("every", "period", "common", "moves"),
    [
        (4, 3, True, [6, 12]),  # due after 4, at the end of the round that is on by then
        (6, 3, True, [6, 12]),  # F = 2 rounds of H = 3
        (1, 3, True, [3, 6, 9, 12]),
        (1, 1, True, list(range(1, 13))),
        (5, 3, False, [5, 10]),  # gossip: nobody waits for a round
        (0, 3, True, []),
    ],
)
@pytest.mark.parametrize("polyak", [1.0, 0.25])
def test_it_moves_where_rounds_end_or_by_own_updates(
    every: int, period: int, common: bool, moves: list[int], polyak: float
) -> None:
    if (every, period, polyak) == (4, 3, 0.25):
        moves = [6, 9, 12]  # an average is to have moved 12 / 4 times
    source = net()
    target = TargetNetwork(source, every=every, polyak=polyak)
    seen = []
    for update, exchange in enumerate(rounds(period, 12), 1):
        changed(source)
        before = [x.clone() for x in target.net.parameters()]
        target.after_update(exchange.staleness, common)
        moved = any(not torch.equal(a, b) for a, b in zip(before, target.net.parameters(), strict=True))
        seen += [update] if moved else []
    assert seen == moves


def test_a_move_goes_its_share_of_the_way() -> None:
    source = net()
    copied, average = TargetNetwork(source), TargetNetwork(source, polyak=0.1)
    start = [x.clone() for x in source.parameters()]
    changed(source)
    for _ in range(20):
        copied.after_update(0, True)
        average.after_update(0, True)
    for old, new, one, other in zip(
        start, source.parameters(), copied.net.parameters(), average.net.parameters(), strict=True
    ):
        assert torch.equal(one, new)
        torch.testing.assert_close(other, new + (old - new) * 0.9**20)
    for target in (copied, average):
        assert torch.equal(target.net[1].running_mean, source[1].running_mean)  # type: ignore[index]


def test_a_move_at_the_end_of_a_round_goes_as_far_as_those_that_were_due() -> None:
    source = net()
    rare = TargetNetwork(source, every=2, polyak=0.1)
    start = [x.clone() for x in source.parameters()]
    changed(source)
    for exchange in rounds(5, 10):
        rare.after_update(exchange.staleness, True)
    for old, new, moved in zip(start, source.parameters(), rare.net.parameters(), strict=True):
        torch.testing.assert_close(moved, new + (old - new) * 0.9**5)  # two moves, then three


def test_small_moves_of_a_bfloat16_net_are_not_rounded_off() -> None:
    source = net().bfloat16()
    target, other = TargetNetwork(source, polyak=1e-3), TargetNetwork(source, polyak=1e-3)
    start = [x.clone().float() for x in source.parameters()]
    changed(source)
    for step in range(3000):
        target.after_update(0, True)
        if step == 1499:
            other.load(target.state())
        elif step >= 1500:
            other.after_update(0, True)
    share = (1 - 1e-3) ** 3000
    for old, new, own, loaded in zip(
        start, source.parameters(), target.net.parameters(), other.net.parameters(), strict=True
    ):
        torch.testing.assert_close(own.float(), new + (old - new) * share, rtol=1e-2, atol=1e-2)
        assert (own - old).abs().max() > 0.9
        assert torch.equal(own, loaded)
    target.reset()
    for own, new in zip(target.net.parameters(), source.parameters(), strict=True):
        assert torch.equal(own, new)


@pytest.mark.parametrize("common", [True, False])
def test_within_a_common_round_a_reset_waits_for_its_end(common: bool) -> None:
    """Replicas have different nets until then; the state keeps that it is due."""
    source = net()
    target = TargetNetwork(source, every=0, polyak=0.5)
    seen = []
    for update, exchange in enumerate(rounds(3, 9)):
        if update in (0, 4, 6):
            target.reset()
        changed(source)
        before = target.net[0].weight.clone()
        saved, target = target.state(), TargetNetwork(source, every=0, polyak=0.5)
        target.load(saved)
        target.after_update(exchange.staleness, common)
        if not torch.equal(before, target.net[0].weight):
            assert torch.equal(source[0].weight, target.net[0].weight)
            seen.append(update)
    assert seen == ([5] if common else [])


def test_it_is_a_copy_without_gradients_that_answers_as_the_net_did() -> None:
    source = net().eval()
    target, x = TargetNetwork(source), torch.randn(5, 3)
    before = source(x)
    changed(source)
    assert torch.equal(target(x), before)
    assert not target(x).requires_grad


def test_it_goes_on_from_its_state() -> None:
    source = net()
    one, other = (TargetNetwork(source, every=3, polyak=0.5) for _ in range(2))
    other.net.load_state_dict(net(1).state_dict())
    for _ in range(4):
        changed(source)
        one.after_update(0, True)
    other.load(one.state())
    for _ in range(4):
        changed(source)
        for target in (one, other):
            target.after_update(0, True)
    for name, x in one.net.state_dict().items():
        assert torch.equal(x, other.net.state_dict()[name])


@pytest.mark.parametrize(("settings", "words"), [({"every": -1}, "-1"), ({"polyak": 0.0}, "polyak is 0.0")])
def test_what_makes_no_sense_is_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TargetNetwork(net(), **settings)  # type: ignore[arg-type]
