"""What compression keeps of a vector, and that error feedback loses nothing of a sum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fabric.networked import at_once, channels, members
from murmurate.fabric.network.compression import BLOCK, ErrorFeedback, codec
from murmurate.strategies.checkpoint_barrier import CheckpointBarrier
from waiting import DEADLINE_SECONDS

COUNT = 3 * BLOCK + 17


def randn(seed, count=COUNT, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def encoded(codec, x, encoder=None):
    """The bytes that ``encoder``, else the codec itself, writes for ``x``."""
    wire = np.empty(codec.wire_bytes, dtype=np.uint8)
    (encoder or codec).encode(x, wire)
    return wire


def through(kind, x):
    one = codec(kind, x.numel(), x.dtype)
    wire = encoded(one, x)
    assert wire.nbytes == one.wire_bytes
    return one.decode(wire)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool])
def test_none_keeps_every_bit(dtype):
    x = (randn(0, dtype=torch.float64) * 100).to(dtype)
    assert torch.equal(through("none", x), x)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_what_is_no_wide_float_is_left_alone(kind, dtype):
    x = (randn(0) * 100).to(dtype)
    assert torch.equal(through(kind, x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bfloat16_rounds_to_the_nearest(dtype):
    x = randn(1, dtype=dtype)
    assert torch.equal(through("bfloat16", x), x.to(torch.bfloat16).to(dtype))


def oracle_int8(x):
    """Block by block, in numpy and in the words of the docstring."""
    out = []
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        scale = np.float32(np.abs(block).max() / np.asarray(127, dtype=x.dtype))
        whole = np.clip(np.rint(block / x.dtype.type(scale)), -127, 127) if scale > 0 else block * 0
        out.append(whole * x.dtype.type(scale))
    return np.concatenate(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_int8_is_exactly_what_it_says(dtype, size):
    x = randn(2, dtype=dtype) * size
    got = through("int8", x)
    assert torch.equal(got, torch.from_numpy(oracle_int8(x.numpy())))
    for start in range(0, COUNT, BLOCK):
        block = x[start : start + BLOCK]
        half_a_step = float(block.abs().max()) / 127 / 2
        assert float((got[start : start + BLOCK] - block).abs().max()) <= half_a_step * (1 + 1e-5)


@pytest.mark.parametrize("whole", [0.0, 127.0, -127.0, 1.0])
def test_int8_is_exact_where_it_can_be(whole):
    x = torch.full((BLOCK + 3,), whole)
    assert torch.allclose(through("int8", x), x, rtol=1e-7, atol=0)


def test_int8_takes_a_quarter_and_bfloat16_a_half():
    n = 1 << 20
    assert codec("bfloat16", n, torch.float32).wire_bytes == 2 * n
    assert codec("int8", n, torch.float32).wire_bytes == n + 4 * n // BLOCK


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_int8_shows_what_is_not_finite(bad):
    x = randn(3)
    x[BLOCK + 5] = bad
    got = through("int8", x)
    assert torch.isnan(got[BLOCK : 2 * BLOCK]).all()
    assert torch.isfinite(got[:BLOCK]).all()
    assert torch.isfinite(got[2 * BLOCK :]).all()


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_error_feedback_keeps_the_sum(kind):
    """sum of what arrived + residual = sum of what was sent, to float64's rounding."""
    one = codec(kind, COUNT, torch.float64)
    stream = ErrorFeedback(one)
    sent = torch.zeros(COUNT, dtype=torch.float64)
    arrived = torch.zeros(COUNT, dtype=torch.float64)
    for turn in range(50):
        x = randn(turn, dtype=torch.float64) * 10 ** (turn % 3)
        arrived += one.decode(encoded(one, x, stream))
        sent += x
    torch.testing.assert_close(arrived + stream.residual, sent, rtol=0, atol=1e-10)
    assert float(stream.residual.abs().max()) > 0, "with nothing kept back this would test nothing"


def test_without_feedback_the_same_sum_is_off():
    one = codec("int8", COUNT, torch.float32)
    x = (randn(0) * 1e-3).clamp(-3e-3, 3e-3)
    x[::BLOCK] = 1.0  # beside these the others round to nothing
    kept = ErrorFeedback(one)
    plain = sum(one.decode(encoded(one, x)) for _ in range(100))
    fed = sum(one.decode(encoded(one, x, kept)) for _ in range(100))
    small = torch.ones(COUNT, dtype=torch.bool)
    small[::BLOCK] = False
    assert float(plain[small].abs().max()) == 0.0
    torch.testing.assert_close(fed[small], 100 * x[small], rtol=0, atol=2 / 127)


def test_a_delta_that_is_not_finite_does_not_spoil_the_next():
    one = codec("int8", COUNT, torch.float32)
    stream = ErrorFeedback(one)
    bad = randn(0)
    bad[3] = math.nan
    assert torch.isnan(one.decode(encoded(one, bad, stream))).any()
    assert torch.isfinite(one.decode(encoded(one, randn(1), stream))).all()


def test_an_unknown_compression_is_an_error_with_the_known_ones():
    with pytest.raises(ValueError, match="none, bfloat16, int8"):
        codec("zip", 4, torch.float32)


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("kind", ["none", "bfloat16", "int8"])
def test_mail_and_register_are_compressed_in_memory_too_and_collectives_exact(kind, shared_memory):
    like = torch.zeros(COUNT)
    with members(2, compression=kind, shared_memory=shared_memory) as fabrics:
        here, there = channels(fabrics, like=like)
        x, one = randn(5), codec(kind, COUNT, torch.float32)
        feedback = ErrorFeedback(one)
        for turn in range(5):
            assert here.send(1, "x", x * turn, note=turn)
            message = there.wait("x", DEADLINE_SECONDS)
            assert torch.equal(message.x, one.decode(encoded(one, x * turn, feedback)))
        here.publish(x)
        assert there.wait_newer([0], [0], DEADLINE_SECONDS)
        assert torch.equal(there.peek(0)[0], one.decode(encoded(one, x)))
        y = x.clone()
        z = -0.5 * x
        at_once(lambda: here.mean_(y), lambda: there.mean_(z))
        assert torch.equal(y, z)
        assert torch.equal(y, (x + -0.5 * x) / 2)
        sent = torch.zeros(COUNT)
        at_once(lambda: here.broadcast_(x, 0), lambda: there.broadcast_(sent, 0))
        assert torch.equal(sent, x)


def test_members_with_different_compression_get_an_error():
    with members(2) as fabrics:
        here = fabrics[0].channel("model", torch.zeros(4))
        object.__setattr__(fabrics[1], "compression", "int8")
        there = fabrics[1].channel("model", torch.zeros(4))

        def complaint(fabric):
            with pytest.raises(Exception, match="give all members the same model and settings") as caught:
                fabric.mean_(torch.zeros(4))
            return type(caught.value).__name__

        assert at_once(lambda: complaint(here), lambda: complaint(there)) == ["FabricError"] * 2


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("compression", ["bfloat16", "int8"])
def test_a_short_message_is_not_compressed(compression, shared_memory):
    """Its numbers may be anything, and may be more than the compressed vector has bytes."""
    with members(2, compression=compression, shared_memory=shared_memory) as fabrics:
        here, there = channels(fabrics, like=torch.zeros(50_000))
        short = torch.arange(49_000, dtype=torch.int32).view(torch.float32)
        whole = torch.full((50_000,), 3.0)
        for x in (short, whole, short[:7]):
            assert here.send(1, "x", x)
        found = [there.wait("x", DEADLINE_SECONDS).x for _ in range(3)]
        assert torch.equal(found[0].view(torch.int32), short.view(torch.int32))
        assert torch.equal(found[1], whole)
        assert torch.equal(found[2].view(torch.int32), short[:7].view(torch.int32))
        with pytest.raises(ValueError, match="is for"):
            here.send(1, "x", torch.zeros(50_001))


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("compression", ["none", "bfloat16", "int8"])
def test_what_rounding_kept_back_before_a_cut_comes_after_it(compression, shared_memory):
    """sum of what arrived = sum of what was sent, once deltas of 0 have brought the rest."""
    with members(2, compression=compression, shared_memory=shared_memory) as fabrics:
        here, there = channels(fabrics, like=torch.zeros(COUNT))
        sender, receiver = CheckpointBarrier("delta"), CheckpointBarrier("delta")
        sent, arrived = torch.zeros(COUNT), torch.zeros(COUNT)

        def absorb(message):
            arrived.add_(message.x)

        for number in (1, 2):
            for turn in range(5):
                x = randn(10 * number + turn)
                assert here.send(1, "delta", x)
                sent += x
            before = here.traffic.bytes
            assert sender.send_markers(here, number, [1], x)
            assert here.traffic.bytes - before == x.element_size(), (
                "a marker of N numbers has room for a delta"
            )
            assert receiver.drain(there, number, [0], absorb, 20.0)
        for _ in range(5):
            assert here.send(1, "delta", torch.zeros(COUNT))
            absorb(there.wait("delta", DEADLINE_SECONDS))
        torch.testing.assert_close(arrived, sent, rtol=0, atol=1e-5)
