"""Adam of one vector against torch's own."""

import copy

import pytest
import torch
from torch import nn

from murmurate.replica.adam import Adam

OPTIONS = [
    {},
    {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1},
    {"lr": 0.01, "amsgrad": True},
    {"lr": 0.01, "maximize": True},
]


def vector(seed=0, size=50):
    return nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(seed)))


def gradients(count, size=50):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator) for _ in range(count)]


def steps(optimizer, parameters, count=5):
    for gradient in gradients(count):
        for x in parameters:
            x.grad = gradient
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9  # as schedules do


@pytest.mark.parametrize("options", OPTIONS)
def test_steps_and_memory_are_torchs_bit_for_bit(options):
    mine, theirs = vector(), vector()
    one, other = Adam([mine], **options), torch.optim.Adam([theirs], fused=True, **options)
    steps(one, [mine])
    steps(other, [theirs])
    assert torch.equal(mine, theirs)
    memory, expected = one.state[mine], other.state[theirs]
    assert memory.keys() == expected.keys()
    assert all(torch.equal(memory[key], expected[key]) for key in expected)


def test_torch_is_asked_for_the_first_step_only(monkeypatch):
    x, asked = vector(), []
    optimizer, whole = Adam([x]), torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda *given: asked.append(given) or whole(*given))
    steps(optimizer, [x], 4)
    assert len(asked) == 1


def test_what_amp_found_is_heeded():
    """A GradScaler leaves it to a fused optimizer to unscale, and to skip what is not finite."""
    x = vector()
    optimizer = Adam([x], lr=0.1)
    steps(optimizer, [x], 2)
    before = x.detach().clone()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    x.grad = torch.full_like(x, float("inf"))
    optimizer.step()
    assert torch.equal(x, before)


def test_a_state_that_is_not_fused_is_stepped_as_it_says(monkeypatch):
    x, y = vector(), vector()
    plain, mine = torch.optim.Adam([x], lr=0.1), Adam([y], lr=0.1)
    steps(plain, [x], 2)
    with torch.no_grad():
        y.copy_(x)
    mine.load_state_dict(copy.deepcopy(plain.state_dict()))
    monkeypatch.setattr(torch, "_fused_adam_", None)
    steps(mine, [y], 2)
    steps(plain, [x], 2)
    assert torch.equal(x, y)


def test_several_vectors_and_groups_are_left_to_torch():
    mine, theirs = [vector(0), vector(1), vector(2)], [vector(0), vector(1), vector(2)]
    groups = [[{"params": x[:2]}, {"params": x[2:], "lr": 0.1}] for x in (mine, theirs)]
    steps(Adam(groups[0]), mine)
    steps(torch.optim.Adam(groups[1], fused=True), theirs)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_without_a_gradient_nothing_moves():
    x = vector()
    before, optimizer = x.detach().clone(), Adam([x])
    optimizer.step()
    assert torch.equal(x, before)
    steps(optimizer, [x], 2)
    before, x.grad = x.detach().clone(), None
    optimizer.step()
    assert torch.equal(x, before)


def test_hooks_and_closures_are_called():
    x, seen = vector(), []
    optimizer = Adam([x], lr=0.1)
    steps(optimizer, [x], 1)
    optimizer.register_step_pre_hook(lambda *call: seen.append("before"))
    optimizer.register_step_post_hook(lambda *call: seen.append("after"))
    assert optimizer.step(lambda: seen.append("loss") or 3.0) == 3.0
    steps(optimizer, [x], 1)
    assert seen == ["before", "loss", "after", "before", "after"]


def test_its_state_is_saved_and_goes_on():
    mine, theirs = vector(), vector()
    one, other = Adam([mine], lr=0.1), Adam([theirs], lr=0.1)
    steps(one, [mine], 3)
    with torch.no_grad():
        theirs.copy_(mine)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    steps(one, [mine], 2)
    steps(other, [theirs], 2)
    assert torch.equal(mine, theirs)
