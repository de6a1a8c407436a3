"""Gradients of few rows: the scaled vector is the dense one, whatever happens to it in between."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from murmurate.replica import scale as scale_module
from murmurate.replica import sparse
from murmurate.replica.scale import Scale
from murmurate.replica.sparse import Rows
from murmurate.replica.vector import Replica
from waiting import DEADLINE_SECONDS

SHAPE = 12, 16


class Table(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.x = nn.Parameter(torch.rand(*SHAPE, generator=generator).to(dtype))


def replica(rate=0.3, dtype=torch.float32, **options):
    return Replica("table", Table(dtype), lambda ps: torch.optim.SGD(ps, lr=rate), **options)


def some_rows(generator, shrink=1.0, dtype=torch.float32):
    row = torch.randperm(SHAPE[0], generator=generator)[:5]
    return Rows(row, torch.rand(5, SHAPE[1], generator=generator).to(dtype), shrink)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaled_is_dense(dtype, native, monkeypatch):
    if not native:
        monkeypatch.setattr(sparse, "kernels", None)
    generator = torch.Generator().manual_seed(1)
    rates = [0.05 + 0.9 * (t % 7) / 7 for t in range(400)]
    scaled, dense = (replica(1.0, dtype, schedule=lambda t: rates[t]) for _ in range(2))
    dense.scale.keeps_scale = False
    lowest = 1.0
    for _ in rates:
        step = some_rows(generator, dtype=dtype)
        scaled.follow(step)
        dense.follow(step)
        lowest = min(lowest, scaled.scale.value)
    assert lowest < 1e-9  # it was folded in on the way
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(scaled.values(), dense.values(), rtol=tolerance, atol=tolerance)
    assert scaled.clock == dense.clock == len(rates)
    assert torch.equal(dense.values(), dense.params)


def test_a_step_is_what_it_says():
    it = replica(0.25, torch.float64)
    x = it.values().detach().clone().view(SHAPE)
    step = Rows(torch.tensor([3, 0]), torch.rand(2, SHAPE[1], dtype=torch.float64), shrink=0.5)
    it.follow(step)
    expected = x * (1 - 0.25 * 0.5)
    expected[[3, 0]] += 0.25 * step.values
    torch.testing.assert_close(it.values().view(SHAPE), expected, rtol=1e-12, atol=0)


def test_a_step_of_one_replaces_it():
    it = replica(1.0)
    it.follow(Rows(torch.tensor([2]), torch.ones(1, SHAPE[1])))
    expected = torch.zeros(SHAPE)
    expected[2] = 1
    assert torch.equal(it.values().view(SHAPE), expected)


def test_who_loads_a_state_goes_on_to_the_bit():
    generator = torch.Generator().manual_seed(2)
    one, other = replica(), replica()
    for _ in range(9):
        one.follow(some_rows(generator))
    assert not torch.equal(one.values(), one.params)
    other.follow(some_rows(generator))  # has a scale of its own, which loading forgets
    other.load(one.state())
    assert other.scale.value == one.scale.value < 1.0
    assert torch.equal(other.params, one.params)
    step = some_rows(generator)
    one.follow(step)
    other.follow(step)
    assert torch.equal(other.values(), one.values())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), "plain SGD"),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1), "plain SGD"),
        (lambda ps: torch.optim.Adam(ps, lr=0.1), "plain SGD"),
        (lambda ps: torch.optim.SGD(ps, lr=1.5), "leaves nothing"),
    ],
)
def test_what_would_move_other_rows_is_refused(make, words):
    it = Replica("table", Table(), make)
    before = it.values().clone()
    with pytest.raises(ValueError, match=words):
        it.follow(some_rows(torch.Generator().manual_seed(0)))
    assert torch.equal(it.values(), before)


@pytest.mark.parametrize(
    "rows",
    [
        Rows(torch.tensor([12]), torch.ones(1, 16)),
        Rows(torch.tensor([-1]), torch.ones(1, 16)),
        Rows(torch.tensor([1]), torch.ones(1, 7)),
        Rows(torch.tensor([1, 2]), torch.ones(1, 16)),
        Rows(torch.tensor([1], dtype=torch.int32), torch.ones(1, 16)),
        Rows(torch.tensor([1]), torch.ones(1, 16, dtype=torch.float64)),
        Rows(torch.tensor([1]), torch.ones(1, 0)),
    ],
)
def test_rows_that_are_not_there(rows):
    with pytest.raises(ValueError, match="row"):
        replica().follow(rows)


def test_a_dense_gradient_after_rows_is_of_the_parameters():
    it = replica(0.5)
    it.follow(Rows(torch.tensor([2]), torch.zeros(1, SHAPE[1])))
    half = it.values().detach().clone()
    with pytest.raises(ValueError, match="fold"):
        it.descend(it.module.x.sum())
    it.follow(torch.ones(len(it)))
    torch.testing.assert_close(it.params.detach(), half - 0.5)
    it.descend(it.module.x.sum())
    torch.testing.assert_close(it.params.detach(), half - 1.0)


class Memory:
    """What members share, in one process or in several."""

    def __init__(self):
        self.tensors = {}

    def __call__(self, key, like):
        return self.tensors.setdefault(key, like.clone().share_memory_())


def shared(members, vector):
    """A scale each, over the same memory."""
    memory, scales = Memory(), [Scale(vector) for _ in range(members)]
    for own, scale in enumerate(scales):
        scale.share(memory, members, own)
    return scales


def test_several_who_shrink_lose_nothing():
    scales = shared(4, torch.ones(16))
    many = 500
    threads = [threading.Thread(target=lambda s=s: [s.shrink(0.001) for _ in range(many)]) for s in scales]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scales[0].value == pytest.approx(0.999 ** (4 * many), rel=1e-9)
    with pytest.raises(ValueError, match="leaves nothing"):
        scales[0].shrink(1.0)


def test_while_it_is_closed_nobody_writes_and_who_read_reads_again():
    x, wrong, steps, over = torch.full((64,), 2.0), [], [0], threading.Event()
    writer, folder, reader = shared(3, x)

    def write():
        while not over.is_set():
            with writer.writing():
                writer.shrink(0.05)
                x.add_(0.1 / writer.value)
            steps[0] += 1

    def read():
        while not over.is_set():
            before = steps[0]
            values = reader.read_consistently(lambda scale: (scale * float(x[0]), scale * float(x[-1])))
            # each step between the scale and the numbers is a twentieth; two more were on their way
            apart = max(abs(math.log(value / 2)) for value in values)
            wrong.append(apart + (steps[0] - before + 2) * math.log(0.95))

    end = time.monotonic() + DEADLINE_SECONDS
    folds = 0
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(write), pool.submit(read)]
        while folds < 20 and time.monotonic() < end:
            if folder.value < 1e-4:
                with folder.exclusive() as alone:
                    if alone:
                        folder.fold()
                        folds += 1
        over.set()
    for thread in running:
        thread.result()  # raises what it raised
    assert folds == 20
    # x <- 0.95 x + 0.1 stays at 2; a torn fold would be off by a factor of 1e4
    assert float(x[0]) * folder.value == pytest.approx(2.0, rel=1e-4)
    assert wrong
    assert max(wrong) < 0.1  # between a scale and its numbers there was no fold


def test_any_of_several_may_multiply_it_in_and_what_is_read_is_whole():
    """Parameters that are 1 all the time, whatever their scale: so must every state and every value be."""
    torch.set_num_threads(1)
    members, memory = 3, Memory()
    replicas = [replica(0.2) for _ in range(members)]
    storage = torch.ones(len(replicas[0]))
    for own, it in enumerate(replicas):
        it.rebind(storage)
        it.scale.share(memory, members, own)
    ones = Rows(torch.arange(SHAPE[0]), torch.ones(SHAPE))
    over, wrong, steps = threading.Event(), [], [0, 0]

    def learn(i):
        try:
            while steps[i] < 400 or (len(wrong) < 20 and not over.is_set()):
                replicas[i].follow(ones)
                steps[i] += 1
        finally:
            over.set()

    def saved():
        state = replicas[2].state()
        return state["params"]["x"] * math.exp(state["log_scale"])

    def look():
        try:
            while not over.is_set():
                for values in (replicas[2].values, saved):
                    before = sum(steps)
                    apart = float(values().log().abs().max())
                    # each step that comes between the vector and its scale is a fifth; two more were on their
                    # way before, and two after
                    wrong.append(apart + (sum(steps) - before + 4) * math.log(0.8))
        finally:
            over.set()

    with ThreadPoolExecutor(3) as pool:
        running = [*(pool.submit(learn, i) for i in range(2)), pool.submit(look)]
    for thread in running:
        thread.result()  # raises what it raised
    assert len(wrong) >= 20
    assert max(wrong) < 0.1  # a torn fold would be 23 nats
    assert float((replicas[0].values() - 1).abs().max()) < 0.9


def test_two_who_load_states_with_other_scales_at_once_do_not_mix_these():
    """Parameters that are 1 in both states, once with the scale multiplied in."""
    memory, storage, (one, other) = Memory(), torch.ones(SHAPE[0] * SHAPE[1]), (replica(0.2), replica(0.2))
    for own, it in enumerate((one, other)):
        it.rebind(storage)
        it.scale.share(memory, 2, own)
    one.follow(Rows(torch.arange(SHAPE[0]), torch.ones(SHAPE)))
    earlier = one.state()
    with one.scale.exclusive():
        one.scale.fold()
    later, restore = other.state(), one.scale.restore

    def restore_while_the_other_loads(logarithm):
        restore(logarithm)
        other.load(later)

    one.scale.restore = restore_while_the_other_loads
    one.load(earlier)
    torch.testing.assert_close(one.values(), torch.ones(len(one)))
    torch.testing.assert_close(other.values(), one.values())


def test_who_writes_for_ever_does_not_stop_the_others():
    stuck, folder = shared(2, torch.ones(16))
    with stuck.writing(), folder.exclusive() as alone:
        assert not alone
    with folder.exclusive() as alone:
        assert alone
    assert folder.read_consistently(lambda scale: scale) == 1.0


# -- deaths -----------------------------------------------------------------------------------------------

LARGE = 3 * scale_module._CHUNK + 100


def dies(point, work):
    """``work`` in a process that is killed by SIGKILL, at the latest in its ``point``-th multiplication."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_with_a_deadly_multiplication, args=(point, work))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def _with_a_deadly_multiplication(point, work):
    """It multiplies half of a chunk, and is dead."""
    count = itertools.count()

    def multiply(copy, factor, out):
        half = len(out) // 2
        torch.mul(copy[:half], factor, out=out[:half])
        if next(count) == point:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.mul(copy[half:], factor, out=out[half:])

    scale_module.torch = types.SimpleNamespace(**{**vars(torch), "mul": multiply})
    work()


@pytest.mark.parametrize("chunk", range(4))
def test_who_dies_while_multiplying_the_scale_in_leaves_a_vector_that_the_others_mend(chunk):
    torch.set_num_threads(1)
    x = torch.rand(LARGE, generator=torch.Generator().manual_seed(3)).share_memory_()
    survivor, victim, bystander = shared(3, x)
    survivor.shrink(0.999)
    victim.shrink(0.5)
    expected = x * survivor.value

    def fold():
        with victim.exclusive() as alone:
            assert alone
            victim.fold()

    dies(chunk, fold)
    assert not torch.allclose(x * survivor.value, expected)  # it is torn
    # the first who reads or writes mends it
    seen = bystander.read_consistently(lambda scale: scale * x)
    torch.testing.assert_close(seen, expected)
    with survivor.writing():
        survivor.shrink(0.25)
    torch.testing.assert_close(x * survivor.value, 0.75 * expected)
    with survivor.exclusive() as alone:  # and it can be multiplied in again
        assert alone
        survivor.fold()
    assert survivor.value == 1.0
    torch.testing.assert_close(x, 0.75 * expected)


def test_who_dies_while_writing_does_not_keep_the_others_out():
    x = torch.ones(64).share_memory_()
    survivor, victim = shared(2, x)

    def write():
        with victim.writing():
            os.kill(os.getpid(), signal.SIGKILL)

    dies(0, write)
    with survivor.exclusive() as alone:
        assert alone
        survivor.fold()
    assert torch.equal(x, torch.ones(64))


def test_an_exception_in_the_middle_of_a_fold_is_mended_too(monkeypatch):
    x = torch.full((LARGE,), 4.0)
    one, other = shared(2, x)
    one.shrink(0.5)

    def interrupted(copy, factor, out):
        torch.mul(copy[:9], factor, out=out[:9])
        raise KeyboardInterrupt

    monkeypatch.setattr(scale_module, "torch", types.SimpleNamespace(**{**vars(torch), "mul": interrupted}))
    with pytest.raises(KeyboardInterrupt), one.exclusive():
        one.fold()
    monkeypatch.undo()
    torch.testing.assert_close(other.read_consistently(lambda scale: scale * x), torch.full((LARGE,), 2.0))
