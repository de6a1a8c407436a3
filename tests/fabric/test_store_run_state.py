"""A run state over a c10d store: copies in two processes (here: objects over two connections) stay alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import numpy as np
import pytest
from torch.distributed import TCPStore

from murmurate.fabric.interface import FabricError
from murmurate.fabric.network import store_run_state
from murmurate.fabric.network.authenticated_store import AuthenticatedStore, Unauthentic
from murmurate.fabric.network.store_run_state import StoreRunState
from waiting import until


@pytest.fixture
def store() -> TCPStore:
    seconds = timedelta(seconds=5)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=seconds)


def authenticated(store: TCPStore, secret: bytes = b"the run's secret") -> AuthenticatedStore:
    return AuthenticatedStore(store.clone(), "murmurate/a run/1", secret)


@pytest.fixture
def pair(store: TCPStore) -> Iterator[tuple[StoreRunState, StoreRunState]]:
    """Rank 0's run_state, which leads and also keeps a centre's column; and rank 1's."""
    with closing(StoreRunState(3, authenticated(store), [0, 2], leads=True)) as leader:
        with closing(StoreRunState(3, authenticated(store), [1], leads=False)) as other:
            yield leader, other


def test_all_start_alive_and_at_zero(pair: tuple[StoreRunState, StoreRunState]) -> None:
    for run_state in pair:
        assert (list(run_state.living()), run_state.total_env_steps()) == ([0, 1, 2], 0)
        assert not run_state.stop_requested


def test_all_begin_with_the_counts_of_the_checkpoint(store: TCPStore) -> None:
    """Also those of rank 2, whose process is to join later: the leader writes for it."""
    counts = [(300, 3), (200, 2), (100, 1)]
    with closing(StoreRunState(3, authenticated(store), [0, 2], leads=True, counts=counts)) as leader:
        assert leader.total_env_steps() == 600
        with closing(StoreRunState(3, authenticated(store), [1], leads=False, counts=counts)) as other:
            assert other.total_env_steps() == 600
            leader.exchange()
            assert leader.total_env_steps() == 600
            assert [leader.clock(rank) for rank in range(3)] == [3, 2, 1]


def test_each_sees_what_the_others_write(pair: tuple[StoreRunState, StoreRunState]) -> None:
    leader, other = pair
    other.advance(1, 40, 4)
    leader.advance(0, 10, 1)
    leader.advance(2, 0, 7)
    until(lambda: leader.env_steps(1) == 40 and other.env_steps(0) == 10 and other.clock(2) == 7)
    assert leader.total_env_steps() == other.total_env_steps() == 50
    assert leader.request_checkpoint() == 1
    until(lambda: other.checkpoint_requested == 1)
    for rank, run_state in ((0, leader), (2, leader), (1, other)):
        assert not leader.saved_by_all(1)
        run_state.mark_saved(rank, 1)
    until(lambda: leader.saved_by_all(1) and other.saved_by_all(1))


def test_wishes_and_deaths_come_from_the_leader(pair: tuple[StoreRunState, StoreRunState]) -> None:
    leader, other = pair
    leader.mark_dead(2)
    leader.request_stop()
    until(lambda: other.stop_requested and list(other.living()) == [0, 1])


def test_what_was_written_last_is_seen_after_a_close(store: TCPStore) -> None:
    with closing(StoreRunState(2, authenticated(store), [0], leads=True)) as leader:
        with closing(StoreRunState(2, authenticated(store), [1], leads=False)) as other:
            other.mark_finished(1)
        leader.exchange()
        assert leader.has_finished(1)


def test_a_silent_process_is_told_from_an_idle_one(
    pair: tuple[StoreRunState, StoreRunState], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_run_state, "_HEARTBEAT_SECONDS", 0.05)
    leader, other = pair
    until(lambda: leader._beats["run_state/1"][0] >= 5, "it writes nothing and yet is heard of")
    other.close()
    before = leader.silent_seconds(1)
    until(lambda: leader.silent_seconds(1) > before + 0.5)
    assert leader.silent_seconds(0) == 0.0


def test_a_run_state_that_no_member_opened_is_an_error(store: TCPStore) -> None:
    with pytest.raises(FabricError, match="did not open the run state within"):
        StoreRunState(2, authenticated(store), [1], leads=False, deadline_seconds=0.1)


def test_a_lost_store_is_reported_and_no_member_hangs() -> None:
    seconds = timedelta(seconds=1)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=seconds)
    run_state = StoreRunState(2, authenticated(server), [0], leads=True)
    assert run_state.exchange()
    del server
    until(lambda: run_state.lost)
    run_state.advance(0, 1, 1)
    assert run_state.env_steps(0) == 1
    assert not run_state.exchange()
    thread = threading.Thread(target=run_state.close, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


# -- a stranger who reaches the store ---------------------------------------------------------------------


def test_nothing_that_a_stranger_writes_is_believed(
    pair: tuple[StoreRunState, StoreRunState], store: TCPStore
) -> None:
    """He has seen everything, and writes: values of his own, old ones, and those of other members."""

    def refused_by(reader: StoreRunState, key: str, false: bytes) -> None:
        before = reader.refused

        def written_and_refused() -> bool:
            store.set(key, false)  # its owner may have overwritten it
            return reader.refused > before

        until(written_and_refused, "a refusal")

    leader, other = pair
    place = "murmurate/a run/1/run_state/"
    other.advance(1, 40, 4)
    until(lambda: leader.env_steps(1) == 40)
    old_header, old_column = store.get(place + "launcher"), store.get(place + "1")
    other.advance(1, 50, 5)
    leader.request_checkpoint()
    until(lambda: leader.env_steps(1) == 50 and other.checkpoint_requested == 1)
    stop = np.frombuffer(old_header[40:], dtype=np.int64).copy()
    stop[0] = 1
    for false in (old_header[:40] + stop.tobytes(), old_header, old_column, b"", b"x" * 1000):
        refused_by(other, place + "launcher", false)
        assert (other.stop_requested, other.checkpoint_requested) == (False, 1)
        assert list(other.living()) == [0, 1, 2]
        other.advance(1, other.env_steps(1) + 1, 1)
    for false in (old_column, old_header, store.get(place + "0"), b"\0" * 500):
        steps = leader.env_steps(1)
        refused_by(leader, place + "1", false)
        assert leader.env_steps(1) >= steps
    leader.request_stop()
    other.advance(1, 100, 9)
    until(lambda: other.stop_requested and leader.env_steps(1) == 100, "the members go on")


def test_who_has_another_secret_is_refused(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_run_state, "_REFUSED_SECONDS", 0.1)
    with closing(StoreRunState(2, authenticated(store), [0], leads=True)):
        with pytest.raises(Unauthentic, match="was not written with this run's secret"):
            StoreRunState(2, authenticated(store, b"another"), [1], leads=False)


def test_a_leader_that_is_kept_from_the_store_is_silent(
    pair: tuple[StoreRunState, StoreRunState], store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_run_state, "_HEARTBEAT_SECONDS", 0.05)
    leader, other = pair
    header = store.get("murmurate/a run/1/run_state/launcher")
    monkeypatch.setattr(leader._store, "set", lambda *_: None)
    store.set("murmurate/a run/1/run_state/launcher", header)
    until(lambda: other.leader_silent_seconds() > 0.5)
    assert leader.leader_silent_seconds() == 0.0


def test_the_time_for_which_a_process_was_stopped_is_not_the_silence_of_others(store: TCPStore) -> None:
    """As where a scheduler suspends a job on all its hosts: they were stopped at the same time."""
    stopped_seconds = [0.0]

    def clock() -> float:
        return time.monotonic() + stopped_seconds[0]

    with closing(StoreRunState(2, authenticated(store), [0], leads=True, clock=clock)) as leader:
        stopped_seconds[0] = 1000.0
        assert leader.silent_seconds(1) < 100.0
