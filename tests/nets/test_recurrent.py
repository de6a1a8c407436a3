"""The LSTM core against torch.nn.LSTM run on one episode at a time."""

import itertools

import pytest
import torch
from torch import nn

from murmurate.nets.recurrent import LSTMCore

T, B, INPUT, H = 9, 5, 3, 4


@pytest.fixture
def core():
    net = LSTMCore(INPUT, H)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.7 * torch.randn(parameter.shape, generator=generator))
    return net


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, B, INPUT, generator=generator)
    memory = torch.randn(B, 2 * H, generator=generator)
    return x, memory, torch.rand(T, B, generator=generator) < 0.25


def oracle(core, x, memory, first):
    """Each simulator's rollout cut at its firsts; every piece a fresh run of torch.nn.LSTM."""
    lstm = nn.LSTM(INPUT, H)
    lstm.load_state_dict({f"{name}_l0": p for name, p in core.cell.state_dict().items()})
    outputs, after = torch.zeros(T, B, H), torch.zeros(B, 2 * H)
    for b in range(B):
        cuts = sorted({0, T, *(t for t in range(T) if first[t, b])})
        for begin, end in itertools.pairwise(cuts):
            state = torch.zeros(2 * H) if first[begin, b] else memory[b]
            h, c = state[:H].view(1, 1, H), state[H:].view(1, 1, H)
            y, (h, c) = lstm(x[begin:end, b : b + 1], (h.contiguous(), c.contiguous()))
            outputs[begin:end, b] = y[:, 0]
            after[b] = torch.cat([h.flatten(), c.flatten()])
    return outputs, after


@pytest.mark.parametrize("seed", range(4))
def test_unroll_equals_torch_lstm_on_each_episode(core, seed):
    x, memory, first = drawn(seed)
    assert first.any()
    with torch.no_grad():
        torch.testing.assert_close(
            core(x, memory, first), oracle(core, x, memory, first), rtol=1e-5, atol=1e-6
        )


def test_step_by_step_equals_unroll(core):
    x, memory, first = drawn(0)
    outputs, after = core(x, memory, first)
    steps = []
    for t in range(T):
        y, memory = core(x[t : t + 1], memory, first[t : t + 1])
        steps.append(y)
    assert torch.equal(torch.cat(steps), outputs)
    assert torch.equal(memory, after)


def test_nothing_passes_a_first_not_even_a_gradient_or_a_nan(core):
    x, memory, first = drawn(1)
    first[4] = True
    x.requires_grad_()
    memory.requires_grad_()
    outputs, _ = core(x, memory, first)
    outputs[4:].sum().backward()
    assert x.grad[:4].abs().max() == 0
    assert memory.grad.abs().max() == 0
    assert (x.grad[4:] != 0).all()

    with torch.no_grad():
        x[:4] = float("nan")
        again, _ = core(x, memory, first)
    assert torch.equal(again[4:], outputs[4:])


def test_parameters_are_in_cudnn_order_and_counted(core):
    assert [name for name, _ in core.cell.named_parameters()] == [
        "weight_ih",
        "weight_hh",
        "bias_ih",
        "bias_hh",
    ]
    assert sum(p.numel() for p in core.parameters()) == 4 * H * (INPUT + H + 2)


def test_memory_is_one_float32_tensor(core):
    assert core.memory_size == 2 * H
    assert torch.equal(core.initial_memory(3), torch.zeros(3, 2 * H))
    x, memory, first = drawn(2)
    exact = core(x, memory, first)
    outputs, after = core.to(torch.bfloat16)(x, memory, first)
    assert outputs.dtype == torch.bfloat16
    assert after.dtype == torch.float32
    torch.testing.assert_close(outputs.float(), exact[0], rtol=0, atol=0.05)


def test_shapes_that_do_not_match_are_refused(core):
    x, memory, first = drawn(0)
    for bad in (
        (x[0], memory, first),
        (x, memory[:, 1:], first),
        (x, memory, first[:-1]),
        (x, memory[1:], first),
    ):
        with pytest.raises(ValueError, match="do not match"):
            core(*bad)
