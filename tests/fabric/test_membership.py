"""Members of the processes fabric that die and are started again by hand: their messages and versions."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from fabric.hosts import Host, full, rebirth
from murmurate.fabric.processes.fabric import ProcessChannel
from murmurate.fabric.processes.run_state import RunState, TransferRequest
from murmurate.fabric.processes.shared_memory import SharedMemoryFile


@pytest.mark.parametrize(
    "asked",
    [TransferRequest(1, 0, 0, 0), TransferRequest(7, 3, 2, 1), TransferRequest(2**20 - 1, 2047, 2047, 2046)],
)
def test_a_state_transfer_travels_as_one_number_that_a_float64_holds(asked: TransferRequest) -> None:
    assert TransferRequest.unpack(int(float(asked.packed()))) == asked
    assert TransferRequest(asked.number + 1, 0, 0, 0).packed() > asked.packed()


def test_a_heartbeat_while_waiting_undoes_no_work_of_another_thread() -> None:
    run_state = RunState(1)
    run_state.open()
    cells, heartbeats = run_state._rows, 0

    class Interrupted:
        """After each read, another thread of the process works."""

        def __getitem__(self, cell: tuple[int, int]) -> int:
            nonlocal heartbeats
            value = int(cells[cell])
            run_state._rows = cells
            run_state.heartbeat(0)
            run_state._rows = self  # type: ignore[assignment]
            heartbeats += 1
            return value

        def __setitem__(self, cell: tuple[int, int], value: int) -> None:
            cells[cell] = value

    run_state._rows = Interrupted()  # type: ignore[assignment]
    run_state.heartbeat(0, working=False)
    run_state._rows = cells
    assert run_state.work().tolist() == [heartbeats] != [0]


def test_an_incarnation_begins_only_after_the_last_one_has_ended() -> None:
    run_state = RunState(2)
    run_state.open()
    with pytest.raises(ValueError, match="mark it dead"):
        run_state.begin_incarnation(1)
    epochs = [run_state.epoch]
    run_state.mark_dead(1)
    epochs.append(run_state.epoch)
    assert run_state.begin_incarnation(1) == 1
    assert not run_state.is_ready(1)
    assert not run_state.has_entered(1)
    run_state.revive(1)
    epochs.append(run_state.epoch)
    assert epochs == sorted(set(epochs)), "every change raises the epoch"


def test_before_it_enters_a_joiner_is_dead_to_the_others_and_alone_with_itself(
    host: Callable[[int], Host],
) -> None:
    here = host(2)
    fabric, channel = here.member(0)
    joiner, its_channel = rebirth(here, 1)
    assert list(fabric.living()) == [0]
    assert not channel.send(1, "x", full(1.0), deadline_seconds=0.0)
    assert channel.mean_(full(1.0)) == 1, "nobody waits for it"
    x = full(3.0)
    assert its_channel.mean_(x) == 1
    assert torch.equal(x, full(3.0))
    assert list(its_channel.gather(x)) == [1]
    assert list(joiner.living()) == [0, 1], "itself, and whom it knows to live"


@pytest.mark.parametrize("by_agreement", [False, True])
def test_a_member_of_the_beginning_that_is_slow_to_start_admits_who_was_restarted_meanwhile(
    host: Callable[[int], Host], by_agreement: bool
) -> None:
    """Otherwise it waits in its first round for a joiner, which waits for its state."""
    here = host(2)
    rebirth(here, 1, by_agreement)
    fabric, channel = here.member(0, by_agreement=by_agreement)
    assert list(fabric.living()) == [0]
    assert channel.mean_(full(1.0)) == 1, "nobody waits for it"
    fabric.admit(1, 1)
    assert list(fabric.living()) == [0, 1]


def test_a_member_that_has_entered_gets_mail_at_once_and_strategies_hear_of_it_between_two_steps(
    host: Callable[[int], Host],
) -> None:
    here = host(2)
    fabric, channel = here.member(0)
    joiner, its_channel = rebirth(here, 1)
    joiner.enter(fabric.joining_state([0]))
    its_channel.publish(full(2.0))
    joiner.membership.run_state.enter(1)
    assert channel.send(1, "x", full(1.0), deadline_seconds=0.0)
    assert list(fabric.living()) == [0], "a strategy's step sees one set of members"
    assert fabric.membership.newcomers() == [(1, 1)]
    fabric.admit(1, 1)
    assert fabric.membership.newcomers() == []
    assert list(fabric.living()) == [0, 1]
    assert torch.equal(channel.peek(1)[0], full(2.0))


def test_messages_of_and_to_an_incarnation_that_is_over_are_refused_and_counted(
    host: Callable[[int], Host],
) -> None:
    here = host(2)
    _, one = here.member(0)
    _, other = here.member(1)
    other.send(0, "x", full(1.0))
    one.send(1, "x", full(2.0))
    joiner, its_channel = rebirth(here, 1)
    joiner.enter({"rounds": {"model": 0}, "partners": [0], "incarnations": [0, 0]})
    joiner.membership.run_state.enter(1)
    assert one.receive("x") is None
    assert its_channel.receive("x") is None
    assert (one.traffic.refused, its_channel.traffic.refused) == (1, 1)
    # and the rings go on where they were
    for number in range(20):
        assert its_channel.send(0, "x", full(float(number)), note=number, deadline_seconds=0.0)
        message = one.receive("x")
        assert message is not None
        assert (message.sender, message.note) == (1, number)


def test_a_message_that_is_copied_while_its_reader_restarts_does_not_reach_the_next_incarnation(
    host: Callable[[int], Host],
) -> None:
    here = host(2)
    (_, zero), _ = here.member(0), here.member(1)
    store, born = zero._mailbox._store, list[ProcessChannel]()

    def copy_until_it_has_restarted(slot: torch.Tensor, x: torch.Tensor) -> None:
        store(slot, x)
        fabric, channel = rebirth(here, 1)
        fabric.enter({"rounds": {"model": 0}, "partners": [0], "incarnations": [0, 0]})
        fabric.membership.run_state.enter(1)
        born.append(channel)

    zero._mailbox._store = copy_until_it_has_restarted
    assert zero.send(1, "x", full(1.0))
    zero._mailbox._store = store
    assert zero.send(1, "x", full(2.0))
    message = born[0].receive("x")
    assert message is not None
    assert torch.equal(message.x, full(2.0))
    assert born[0].traffic.refused == 1


def test_messages_of_the_dead_arrive_while_no_member_has_taken_their_place(
    host: Callable[[int], Host],
) -> None:
    here = host(2)
    _, one = here.member(0)
    _, other = here.member(1)
    other.send(0, "x", full(1.0))
    here.run_state.mark_dead(1)
    message = one.receive("x")
    assert message is not None, "a delta that was sent counts"


def test_versions_go_on_and_what_a_former_incarnation_was_reading_is_let_go(
    host: Callable[[int], Host],
) -> None:
    here = host(2)
    _, one = here.member(0)
    _, other = here.member(1)
    one.publish(full(1.0))
    other.peek(0)
    for number in range(3):
        other.publish(full(float(number)))
    _, its_channel = rebirth(here, 1)
    assert int(one._pins[0][1]) == 0
    assert its_channel.publish(full(9.0)) == 4
    assert one.version(1) == 4
    assert torch.equal(one.peek(1)[0], full(9.0))


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_messages_held_by_the_living_stay_and_those_held_by_the_dead_block_no_sender(
    host: Callable[[int], Host], who: str
) -> None:
    here = host(2)
    (_, zero), (_, one) = here.member(0), here.member(1)
    kept: list[torch.Tensor] = []

    def exchange(first: int, count: int) -> None:
        for number in range(first, first + count):
            assert zero.send(1, "x", full(float(number)), deadline_seconds=0.0)
            message = one.receive("x")
            assert message is not None
            kept.append(message.x)

    exchange(0, 6)
    if who == "sender":
        zero = rebirth(here, 0)[1]
    else:
        fabric, one = rebirth(here, 1)
        fabric.enter({"rounds": {"model": 0}, "partners": [0], "incarnations": [0, 0]})
        fabric.membership.run_state.enter(1)
        held_by_the_dead = kept[:4]  # lent, and nobody will ever give them back
        kept = []
    exchange(6, 20)
    assert [x.unique().tolist() for x in kept] == [[float(number)] for number in range(26 - len(kept), 26)]
    if who == "receiver":
        del held_by_the_dead  # until here its memory was in use


def test_a_reader_that_is_slower_than_its_sender_lets_the_queue_become_full(
    host: Callable[[int], Host],
) -> None:
    here = host(2)
    (_, zero), (_, one) = here.member(0), here.member(1)
    sent, read = 0, list[float]()
    for _ in range(50):
        while zero.send(1, "x", full(float(sent)), deadline_seconds=0.0):
            sent += 1
            assert sent - len(read) < 30, "a queue without a bound"
        message = one.receive("x")
        assert message is not None
        read.append(float(message.x[0]))
    assert read == list(range(50))


def test_a_message_that_is_forgotten_gives_its_slot_back(host: Callable[[int], Host]) -> None:
    here = host(2)
    (_, zero), (_, one) = here.member(0), here.member(1)
    places = set()
    for _ in range(50):
        assert zero.send(1, "x", full(1.0))
        message = one.receive("x")
        assert message is not None
        places.add(message.x.data_ptr())
        del message
    assert len(places) == 1


def test_memory_that_is_closed_again_closes_no_other_file() -> None:
    """As after an error between two epochs, when the memory of the first is closed already."""
    memory_file = SharedMemoryFile.create()
    number = memory_file.descriptor
    memory_file.close()
    with open(os.devnull, "rb") as other:
        assert other.fileno() == number, "the system gives out the lowest number that is free"
        memory_file.close()
        os.fstat(other.fileno())
