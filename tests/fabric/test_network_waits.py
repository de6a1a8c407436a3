"""For whom members of the network fabric wait, and how long: the late, the stopped, those that have ended."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from fabric.networked import N, at_once, channels, fill, members
from murmurate.fabric.interface import FabricError
from murmurate.fabric.network import pending
from murmurate.fabric.network.frames import Closed
from murmurate.fabric.network.handshake import dial
from murmurate.fabric.processes.run_state import RunState
from waiting import DEADLINE_SECONDS, until


def test_members_wait_for_one_that_is_late_with_its_channel(monkeypatch):
    monkeypatch.setattr(pending, "_MAX_BYTES", 100)
    with members(2, shared_memory=False) as fabrics:
        here = fabrics[0].channel("model", torch.zeros(N))
        sent = [fill(value) for value in range(20)]
        assert all(here.send(1, "x", x) for x in sent)
        late = fabrics[1].endpoint.pending
        until(lambda: not late.has_room(4 * N))
        there = fabrics[1].channel("model", torch.zeros(N))
        for x in sent:
            message = there.wait("x", DEADLINE_SECONDS)
            assert message is not None
            assert torch.equal(message.x, x)
        assert not fabrics[1].refused
        assert fabrics[0].endpoint.connections[1].times_connected == 1


def test_what_was_sent_before_the_close_still_arrives_and_nothing_is_left_behind():
    before = set(threading.enumerate())
    with members(2) as fabrics:
        here, there = channels(fabrics)
        for number in range(30):
            assert here.send(1, "x", fill(number))
        here.publish(fill(7))
        closing = threading.Thread(target=fabrics[0].close)
        closing.start()
        until(lambda: fabrics[1].endpoint.connections[0].finished)
        assert [float(there.wait("x", DEADLINE_SECONDS).x[0]) for _ in range(30)] == [
            float(n) for n in range(30)
        ]
        assert there.version(0) == 1, "who closes answers until the others close too"
        assert there.mean_(fill(2)) == 1, "who has finished is not waited for"
        assert not there.send(0, "x", fill(0))
        fabrics[1].close()
        closing.join(20)
        assert not closing.is_alive()
    until(lambda: not [t for t in set(threading.enumerate()) - before if t.is_alive()])


def test_a_member_that_has_just_restarted_is_not_lost():
    """The connection to its former incarnation was once lost, long ago."""
    with members(2) as fabrics:
        here, _ = channels(fabrics)
        connection = fabrics[0].endpoint.connections[1]
        with fabrics[0].endpoint.lock:
            connection._lost_at -= 3600.0
            assert not here.has_lost(1)
            connection.replace(dataclasses.replace(connection.record, incarnation=bytes(16)))
            assert not here.has_lost(1)


def test_no_newer_version_is_awaited_of_a_member_that_has_made_its_last_step():
    """It stays connected until all have ended."""
    run_state = RunState(2)
    run_state.open()
    with members(2, run_state=run_state) as fabrics:
        here, there = channels(fabrics)
        there.publish(fill(1))
        assert here.wait_newer([1], [0], DEADLINE_SECONDS)
        assert not here.wait_newer([1], [1], 0.0)
        run_state.mark_finished(1)
        assert here.wait_newer([1], [1], 0.0)
        assert fabrics[0].endpoint.connections[1].connected


def test_a_connection_that_comes_about_after_the_close_is_not_kept():
    with members(2) as fabrics:
        endpoint = fabrics[1].endpoint
        connection = endpoint.connections[0]
        handshake = dial(endpoint.credentials, connection.record, connection.received, 5.0)
        endpoint._close_connections()
        with pytest.raises(Closed):
            connection.adopt(handshake)
        assert not connection.connected


@pytest.mark.parametrize("working", [True, False])
def test_a_member_that_works_is_waited_for_beyond_the_deadline(working, monkeypatch):
    run_state = RunState(2)
    run_state.open()
    with members(2, run_state=run_state) as fabrics, ThreadPoolExecutor(1) as pool:
        here, there = channels(fabrics)
        y, late, passed = fill(3), [], 0
        wait = fabrics[0].endpoint.wait

        def next_deadline(condition, deadline_seconds):
            nonlocal passed
            if passed == 3:
                late.append(pool.submit(there.mean_, y))
                monkeypatch.undo()
                return wait(condition, DEADLINE_SECONDS)
            run_state.heartbeat(1, working)
            passed += 1
            return condition()

        monkeypatch.setattr(fabrics[0].endpoint, "wait", next_deadline)
        x = fill(1)
        if working:
            assert (here.mean_(x), late[0].result(DEADLINE_SECONDS)) == (2, 2)
            assert torch.equal(x, fill(2))
            assert torch.equal(y, fill(2))
        else:
            with pytest.raises(FabricError, match=r"rank\(s\) \[1\] did not join round 1.*larger deadline_s"):
                here.mean_(x)
            assert passed == 2  # the deadline, and the time that the leader's message may take


@pytest.mark.parametrize("numbers", [N, 1 << 17], ids=["by the leader", "by an engine"])
def test_time_for_which_a_waiting_member_was_stopped_does_not_count(numbers, monkeypatch):
    """Ctrl-Z stops all members at once: the late ones had no time either."""
    with members(2) as fabrics, ThreadPoolExecutor(1) as pool:
        like = torch.zeros(numbers)
        here, there = channels(fabrics, like=like)
        x, y, late, stopped = like + 1, like + 3, [], 0.0
        wait = fabrics[0].endpoint.changed.wait

        def stop_once(seconds):
            nonlocal stopped
            if threading.current_thread() is not threading.main_thread():
                return wait(seconds)
            if not late and stopped:
                late.append(pool.submit(there.mean_, y))
            stopped = 3600.0
            return wait(seconds)

        clock = time.monotonic
        for module in ("endpoint", "collectives"):
            monkeypatch.setattr(
                f"murmurate.fabric.network.{module}.time",
                SimpleNamespace(monotonic=lambda: clock() + stopped, sleep=time.sleep),
            )
        monkeypatch.setattr(fabrics[0].endpoint.changed, "wait", stop_once)
        assert (here.mean_(x), late[0].result(DEADLINE_SECONDS)) == (2, 2)
        assert torch.equal(x, like + 2)
        assert torch.equal(y, like + 2)


def test_a_member_that_goes_on_with_other_rounds_is_not_waited_for():
    """It works, but has left this one out: packets between them are lost, for example."""
    run_state = RunState(2)
    run_state.open()
    with members(2, run_state=run_state, deadline_seconds=0.2) as fabrics:
        here, _ = channels(fabrics)
        updates = itertools.count(1)

        def alone(condition):
            run_state.advance(1, env_steps=0, clock=next(updates))
            return condition()

        wait = fabrics[0].endpoint.wait
        fabrics[0].endpoint.wait = lambda condition, *rest: wait(lambda: alone(condition), *rest)
        with pytest.raises(FabricError, match=r"rank\(s\) \[1\] did not join round 1.*larger deadline_s"):
            here.mean_(fill(1))
        fabrics[0].endpoint.wait = wait


@pytest.mark.parametrize("encrypt", [True, False])  # False: gloo has a timeout of its own
def test_a_deadline_may_be_infinite(encrypt):
    x = torch.ones(100_000)  # long enough for an engine
    with members(2, deadline_seconds=float("inf"), encrypt=encrypt, shared_memory=False) as fabrics:
        here, there = channels(fabrics, like=x)
        assert at_once(*(lambda channel=channel: channel.mean_(x.clone()) for channel in (here, there))) == [
            2,
            2,
        ]
