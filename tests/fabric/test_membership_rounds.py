"""Rounds of the processes fabric while members die and are started again by hand, and whom they wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fabric.hosts import Host, full, rebirth
from murmurate.fabric.awake import AwakeClock
from murmurate.fabric.interface import FabricError
from murmurate.fabric.processes.fabric import ProcessChannel, ProcessFabric
from murmurate.training.rejoin import StateTransfer
from waiting import until


def all_together(*acts: Callable[[], object]) -> list[object]:
    """Each in a thread of its own; their results."""
    results: dict[int, object] = {}
    threads = [
        threading.Thread(target=lambda i=i, act=act: results.__setitem__(i, act()), daemon=True)
        for i, act in enumerate(acts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == len(acts), "somebody hangs"
    return [results[i] for i in range(len(acts))]


@pytest.mark.parametrize("raised", [False, True], ids=["before its round", "after its round"])
def test_a_joiner_takes_part_from_one_round_on_for_all(host: Callable[[int], Host], raised: bool) -> None:
    """Rank 2 dies before or after it came to a round; a slow member that looks only when 2 has been started
    again still counts as the quick one did; then all three meet."""
    here = host(3)
    members = [here.member(rank, by_agreement=True) for rank in range(3)]
    quick, slow, victim = (channel for _, channel in members)
    all_together(
        *(
            lambda c=c, v=v: c.mean_(full(v))
            for c, v in zip((quick, slow, victim), (0.0, 3.0, 6.0), strict=True)
        )
    )
    if raised:  # its last deed
        victim._slots[0, 2] = full(6.0)
        victim._rounds[2] = 2

    x, y = full(0.0), full(3.0)

    def come_late() -> int:
        joiner.append(rebirth(here, 2, by_agreement=True))
        return slow.mean_(y)

    joiner: list[tuple[ProcessFabric, ProcessChannel]] = []
    counts = all_together(lambda: quick.mean_(x), come_late)
    assert counts == ([3, 3] if raised else [2, 2])
    assert torch.equal(x, y)
    assert torch.equal(x, full(3.0 if raised else 1.5))

    partners = [sorted(found) for found in all_together(lambda: quick.gather(x), lambda: slow.gather(y))]
    assert partners == [[0, 1], [0, 1]]
    fabric, its_channel = joiner[0]
    place = members[0][0].joining_state(partners[0])
    for present, _ in members[:2]:
        present.admit(2, here.run_state.incarnation(2))
        assert list(present.living()) == [0, 1, 2]
    z = full(9.0)
    came = quick._rounds[:2].copy()

    def enter() -> int:
        until(lambda: bool((quick._rounds[:2] > came).all()), "the others wait for it")
        fabric.enter(place)
        return its_channel.mean_(z)

    assert all_together(lambda: quick.mean_(x), lambda: slow.mean_(y), enter) == [3, 3, 3]
    assert torch.equal(x, y)
    assert torch.equal(x, z)


def test_a_joiner_that_dies_before_its_first_round_is_not_waited_for(host: Callable[[int], Host]) -> None:
    here = host(2)
    fabric, channel = here.member(0, by_agreement=True)
    rebirth(here, 1, by_agreement=True)
    fabric.admit(1, here.run_state.incarnation(1))
    here.run_state.mark_dead(1)
    assert channel.mean_(full(1.0)) == 1


def test_a_newcomer_that_restarts_before_it_is_admitted_is_one_again(
    host: Callable[[int], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strategies must hear of its next incarnation, too."""
    here = host(2)
    fabric, _ = here.member(0)
    heard: list[int] = []
    replicator: Any = SimpleNamespace(joined=heard.append)
    transfer, newcomers = StateTransfer(fabric, replicator, Path()), fabric.membership.newcomers

    def enter(joiner: ProcessFabric) -> None:
        joiner.enter(fabric.joining_state([0]))
        joiner.membership.run_state.enter(1)

    def restart_meanwhile() -> Any:
        found = newcomers()
        here.run_state.mark_dead(1)
        here.run_state.begin_incarnation(1)
        return found

    enter(rebirth(here, 1)[0])
    with monkeypatch.context() as patch:
        patch.setattr(fabric.membership, "newcomers", restart_meanwhile)
        transfer.admit_joined()
    joiner, _ = here.member(1, joins=True)
    here.run_state.revive(1)
    enter(joiner)
    transfer.admit_joined()
    assert heard == [1, 1]
    assert list(fabric.living()) == [0, 1]


@pytest.mark.parametrize("working", [True, False])
def test_a_member_that_works_is_waited_for_beyond_the_deadline(
    host: Callable[[int], Host], monkeypatch: pytest.MonkeyPatch, working: bool
) -> None:
    """As one that collects its first batch or validates; not so one that waits for others itself."""
    machine = host(2)
    (_, zero), (_, one) = machine.member(0), machine.member(1)
    passed = 0

    def next_deadline(condition: Callable[[], bool], deadline_seconds: float) -> bool:
        nonlocal passed
        if passed == 3:
            one.mean_(full(3.0))
        else:
            machine.run_state.heartbeat(1, working)
        passed += not condition()
        return condition()

    monkeypatch.setattr(zero, "_wait", next_deadline)
    x = full(1.0)
    if working:
        assert (zero.mean_(x), passed) == (2, 3)
        assert torch.equal(x, full(2.0))
    else:
        message = r"waited 20 s for rank\(s\) \[1\] in round 1 .* do not answer.* a larger deadline_seconds"
        with pytest.raises(FabricError, match=message):
            zero.mean_(x)
        assert passed == 1


def test_time_for_which_a_waiting_member_was_stopped_does_not_count(
    host: Callable[[int], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z stops all members at once: the late ones had no time either."""
    machine = host(2)
    (_, zero), (_, one) = machine.member(0), machine.member(1)
    now, naps = 1000.0, 0

    def sleep(seconds: float) -> None:
        nonlocal now, naps
        naps += 1
        now += 3600.0 if naps == 2 else 0.9
        if naps == 5:
            one.mean_(full(3.0))

    module = "murmurate.fabric.processes.fabric"
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(f"{module}.AwakeClock", lambda: AwakeClock(lambda: now))
    x = full(1.0)
    assert (zero.mean_(x), naps) == (2, 5)
    assert torch.equal(x, full(2.0))
    before = now
    with pytest.raises(FabricError, match=r"waited 20 s for rank\(s\) \[1\] in round 2"):
        zero.mean_(x)
    assert 20.0 < now - before < 22.0
