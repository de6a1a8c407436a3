"""Row stores and frames are two ways to keep one stream: what can be drawn from them is the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from compiled import GPU, NO_TRITON
from covering import pairwise
from murmurate import native
from murmurate.native import gpu
from murmurate.replay.frame_replay import DISCRETE, FrameReplay
from murmurate.replay.interface import Selection, Steps
from murmurate.replay.priorities import Prioritized
from murmurate.replay.row_replay import RowReplay
from murmurate.replay.rows import Column
from murmurate.replay.tree import Draw

SIMULATORS, STEPS = 3, 400


def stream(stack: int, seed: int) -> list[Steps]:
    """Episodes of 1 to 12 steps that end both ways, in simulators that are out of step; each image is another
    one."""
    generator = torch.Generator().manual_seed(seed)

    def images(count: int) -> torch.Tensor:
        return torch.randint(256, (count, 2, 3), generator=generator, dtype=torch.uint8)

    shown = images(SIMULATORS)[:, None].repeat(1, stack, 1, 1)
    out = []
    for _ in range(STEPS):
        after = torch.cat([shown[:, 1:], images(SIMULATORS)[:, None]], 1)
        ends = torch.randint(12, (SIMULATORS,), generator=generator)
        out.append(
            Steps(
                shown,
                torch.randint(4, (SIMULATORS,), generator=generator),
                torch.randn(SIMULATORS, generator=generator),
                after,
                ends == 0,
                (ends == 1) | (ends == 2),
            )
        )
        fresh = images(SIMULATORS)[:, None].repeat(1, stack, 1, 1)
        shown = torch.where((ends <= 2)[:, None, None, None], fresh, after)
    return out


def everything(replay: Any) -> Counter[tuple[Any, ...]]:
    """What can be drawn, each once. What follows a termination is not looked at."""
    slots = replay.sampler.tree.priorities.nonzero()[:, 0]
    found = replay.gather(Selection(slots, Draw(slots, torch.ones(len(slots)))))
    after = torch.where((found.discount > 0)[:, None, None, None], found.next_observation.cpu(), 0)
    parts = (found.observation.cpu(), found.action, found.reward, found.discount, after)
    return Counter(
        zip(
            *(map(str, part.flatten(1).tolist() if part.dim() > 1 else part.tolist()) for part in parts),
            strict=True,
        )
    )


def stores(
    stack: int,
    steps: int,
    length: int,
    discount: float,
    action: Column = DISCRETE,
    device: torch.device | None = None,
) -> tuple[RowReplay, FrameReplay]:
    more: dict[str, Any] = {"simulators": SIMULATORS, "steps": steps, "discount": discount}
    rows = RowReplay(Prioritized(SIMULATORS * STEPS), Column((stack, 2, 3), torch.uint8), action, **more)
    frames = FrameReplay(
        Prioritized(SIMULATORS * length), (2, 3), stack=stack, action=action, device=device, **more
    )
    return rows, frames


@pytest.mark.parametrize(
    ("stack", "steps", "discount", "backend"),
    pairwise([1, 4], [1, 2, 3, 7], [0.9, 1.0], ["native", "torch"]),
)
def test_rows_and_frames_give_the_same_windows(
    stack: int, steps: int, discount: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last steps before an episode is cut off too: shorter windows, from whose last frame they go on."""
    if backend == "torch":
        monkeypatch.setattr(native, "kernels", None)
    rows, frames = stores(stack, steps, 8 * STEPS, discount)
    played = stream(stack, seed=steps)[:200]
    for step in played:
        for low, high in ((0, 1), (1, SIMULATORS)):
            part = Steps(*(x[low:high] for x in step[:6]))
            assert rows.observe(low, part) == frames.observe(low, part)
    wanted = everything(rows)
    assert rows.inserted == frames.inserted == sum(wanted.values()) > 0.9 * SIMULATORS * len(played)
    assert everything(frames) == wanted


@pytest.mark.parametrize(
    ("stack", "steps", "backend"), [(4, 1, "triton"), (4, 3, "triton"), (1, 2, "triton"), (4, 3, "torch")]
)
def test_images_on_a_device_are_those_of_rows_also_after_a_resume(
    stack: int, steps: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "torch":
        monkeypatch.setattr(gpu, "why_not", lambda device: "the test switches it off")
    elif NO_TRITON:
        pytest.skip(NO_TRITON)
    rows, frames = stores(stack, steps, 8 * STEPS, 0.9, device=torch.device(GPU))
    _, other = stores(stack, steps, 8 * STEPS, 0.9, device=torch.device(GPU))
    played = stream(stack, seed=steps)[:120]
    for t, step in enumerate(played):
        if t == 60:
            other.load(frames.state())
        rows.observe(0, step)
        frames.observe(0, step)
        if t >= 60:
            other.observe(0, step)
    assert len(frames) > 0.8 * SIMULATORS * len(played)
    assert everything(frames) == everything(other) == everything(rows)
    batch = frames.sample(8, 0.4)
    assert batch.observation.device.type == GPU
    assert batch.reward.device.type == "cpu"


@pytest.mark.parametrize("steps", [1, 5])
def test_vector_actions_are_those_of_their_windows_also_after_a_resume(steps: int) -> None:
    vectors = Column((2, 2), torch.float32)
    rows, frames = stores(4, steps, 8 * STEPS, 0.9, vectors)
    _, other = stores(4, steps, 8 * STEPS, 0.9, vectors)
    for t, step in enumerate(stream(4, seed=steps)):
        action = step.action[:, None, None] + torch.tensor([[0.5, t], [0.25, -t]])
        step = step._replace(action=action)
        if t == 100:
            other.load(frames.state())
        rows.observe(0, step)
        frames.observe(0, step)
        if t >= 100:
            other.observe(0, step)
    assert everything(frames) == everything(other) == everything(rows)


@pytest.mark.parametrize("steps", [2, 5])
def test_a_ring_holds_the_newest_of_them_and_goes_on_from_its_state(steps: int) -> None:
    rows, frames = stores(4, steps, 150, 0.9)
    _, other = stores(4, steps, 150, 0.9)
    played = stream(4, seed=steps)
    for step in played[:300]:
        rows.observe(0, step)
        frames.observe(0, step)
    other.load(frames.state())
    for step in played[300:]:
        rows.observe(0, step)
        frames.observe(0, step)
        other.observe(0, step)
    found, wanted = everything(frames), everything(rows)
    assert found == everything(other)
    assert found < wanted
    assert sum(found.values()) > 0.4 * SIMULATORS * 150
    short = [
        length for length in frames._lengths[frames.sampler.tree.priorities.numpy() > 0] if length < steps
    ]
    assert short, "no episode was cut off among what is left"


def test_what_was_saved_without_lengths_was_never_short() -> None:
    _, frames = stores(4, 3, 150, 0.9)
    for step in stream(4, seed=0)[:100]:
        frames.observe(0, step._replace(truncated=torch.zeros(SIMULATORS, dtype=torch.bool)))
    state = frames.state()
    state = {key: value for key, value in state.items() if key != "lengths"}
    _, other = stores(4, 3, 150, 0.9)
    for step in stream(4, seed=1):
        other.observe(0, step)
    other.load(state)
    assert everything(other) == everything(frames)
