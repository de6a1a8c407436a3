"""Copies complete in order, in whichever thread, and a copier can be dropped at any time."""

from __future__ import annotations

import os
import traceback
import weakref

import pytest
import torch
from torch import Tensor

from compiled import NO_KERNELS
from murmurate import native
from murmurate.replay.async_copy import _SMALL_BYTES, AsyncCopy

pytestmark = pytest.mark.skipif(native.kernels is None, reason=NO_KERNELS)

ROW = 4096


def rows(count: int = 4000) -> Tensor:
    return torch.arange(count * ROW // 4, dtype=torch.int32).view(count, ROW // 4)


def ask(copier: AsyncCopy, source: Tensor, index: Tensor) -> Tensor:
    out = torch.empty(len(index), ROW // 4, dtype=torch.int32)
    copier.gather(source, ROW, ROW, index, out)
    return out


def test_what_was_waited_for_is_there_and_what_came_before_it_too() -> None:
    source, copier = rows(), AsyncCopy()
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        asked = []
        for _ in range(20):
            # some are done at once, as they are small
            index = torch.randint(len(source), (int(torch.randint(1, 200, (), generator=generator)),))
            asked.append((index, ask(copier, source, index), copier.number))
        for k in torch.randperm(len(asked), generator=generator).tolist():
            index, out, number = asked[k]
            copier.wait(number)
            assert torch.equal(out, source[index])
    assert copier.number > 500  # of those that are not small
    assert not copier._kept


def test_fields_of_rows_are_told_apart() -> None:
    source, copier = rows(), AsyncCopy()
    places = torch.tensor([[8, 16], [1024, 2048], [0, 4]])
    index = torch.randperm(len(source))[:500]
    out = tuple(torch.empty(500, size // 4, dtype=torch.int32) for size in places[:, 1].tolist())
    copier.split(source, ROW, index, places, out)
    assert copier.number == 1
    copier.wait(1)
    for (offset, size), result in zip(places.tolist(), out, strict=True):
        assert torch.equal(result, source[index, offset // 4 : (offset + size) // 4])


def test_dropped_with_work_left_it_finishes_what_it_began_and_frees_the_rest() -> None:
    source, never_begun = rows(), 0
    expected, untouched = source[:500], torch.tensor(-1, dtype=torch.int32).expand(500, ROW // 4)
    for _ in range(10):
        copier = AsyncCopy()
        memory = [untouched.clone() for _ in range(30)]
        outs = [lasting.view(-1, ROW // 4) for lasting in memory]
        for out in outs:
            copier.gather(source, ROW, ROW, torch.arange(500), out)
        watched = [weakref.ref(out) for out in outs]
        del out, outs
        assert all(ref() is not None for ref in watched), "what it reads and writes is kept by it alone"
        del copier
        assert all(ref() is None for ref in watched)
        dropped = sum(torch.equal(result, untouched) for result in memory)
        assert dropped + sum(torch.equal(result, expected) for result in memory) == len(memory), (
            "none by half"
        )
        never_begun += dropped
    assert never_begun > 0, "it was waited for"


def test_a_forked_child_copies_by_itself() -> None:
    source, copier = rows(), AsyncCopy()
    index = torch.arange(_SMALL_BYTES // ROW + 1).flip(0)
    ask(copier, source, index)
    copier.wait(copier.number)
    child = os.fork()
    if child == 0:
        try:
            out = ask(copier, source, index)
            copier.wait(copier.number)
            right = bool((out.numpy() == source.numpy()[index.numpy()]).all())
            del copier
            os._exit(0 if right else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    out = ask(copier, source, index)
    copier.wait(copier.number)
    assert torch.equal(out, source[index])
