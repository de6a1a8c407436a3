"""Windows that the Triton kernel reads are those of its twin, index_select."""

from __future__ import annotations

import pytest
import torch

from compiled import GPU, needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize("shape", [(1, 1), (84, 84), (3, 7, 5)])
@pytest.mark.parametrize(("count", "window"), [(1, 1), (9, 5), (0, 4)])
def test_windows_are_copied_whole(shape: tuple[int, ...], count: int, window: int) -> None:
    from murmurate.replay._triton_frames import gather

    generator = torch.Generator().manual_seed(count)
    ring = torch.randint(256, (30, *shape), generator=generator, dtype=torch.uint8).to(GPU)
    first = torch.randint(30 - window + 1, (count,), generator=generator)
    first[:1] = 30 - window  # up to the ring's last byte
    first = first.to(GPU)
    # what lies behind the batch must stay as it is
    room = torch.full((count + 1, window, *shape), 77, dtype=torch.uint8, device=GPU)
    gather(ring, first, room[:count])
    wanted = ring[first[:, None] + torch.arange(window, device=GPU)]
    assert torch.equal(room[:count], wanted)
    assert bool((room[count] == 77).all())
