"""Secrets of a job: what is written without the right one is refused, and which ones are good."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from launch.rendezvous_ranks import around, in_thread, job, needs_proc
from murmurate.cli.main import main
from murmurate.errors import Refusal
from murmurate.fabric.network.authenticated_store import AuthenticatedStore
from murmurate.launch import rendezvous
from murmurate.launch.job_spec import MemberHost, fresh_secret
from murmurate.launch.rendezvous import Environment, Rendezvous
from murmurate.launch.secret import drawn_secret, weakness
from waiting import until

pytestmark = needs_proc


@contextlib.contextmanager
def secret(monkeypatch: pytest.MonkeyPatch, text: str) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("MURMURATE_SECRET", text)
        yield


@pytest.mark.parametrize(("leaders", "others"), [("A", ""), ("", "A"), ("A", "B")])
def test_ranks_with_different_secrets_refuse_each_other_by_name(
    leaders: str, others: str, server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"A": drawn_secret(), "B": drawn_secret(), "": ""}
    with secret(monkeypatch, given[others]):
        one = Rendezvous(around(server, 1))
    with secret(monkeypatch, given[leaders]):
        leader = Rendezvous(around(server, 0))
    announced = in_thread(one.join)
    host = re.escape(socket.gethostname())
    with pytest.raises(Refusal, match=rf"rank 1 \(process {os.getpid()} on '{host}'\) has another M"):
        leader.gather()
    with pytest.raises(Refusal, match="rank 0 has another MURMURATE_SECRET than rank 1, or none"):
        announced()


def test_the_secret_of_the_environment_is_that_of_every_message(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MURMURATE_SECRET", drawn_secret())
    one = Rendezvous(around(server, 1))
    announced = in_thread(one.join)
    leader = Rendezvous(around(server, 0))
    leader.gather()
    assert fresh_secret() == ""
    leader.announce(dataclasses.replace(job(leader, "/runs/first"), offer=None))
    spec = announced()
    hosts = [
        MemberHost(spec, ranks.store, [rank], leads=ranks.leads, address="127.0.0.1")
        for rank, ranks in ((0, leader), (1, one))
    ]
    hosts[0].run_state.request_stop()
    until(lambda: hosts[1].run_state.stop_requested)
    monkeypatch.delenv("MURMURATE_SECRET")
    with pytest.raises(Refusal, match="this host does not have MURMURATE_SECRET, and the one"):
        MemberHost(spec, one.store, [1], leads=False, address="127.0.0.1")
    for host in hosts:
        host.close()


@pytest.mark.parametrize("key", ["current", "offer", "announcement", "rank/1", "folder/1"])
def test_what_a_stranger_writes_into_the_store_is_refused(
    key: str, server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He flips one bit of what was written, and of his own signs what he pleases."""
    monkeypatch.setenv("MURMURATE_SECRET", drawn_secret())
    leader, one = Rendezvous(around(server, 0)), Rendezvous(around(server, 1))
    place = "murmurate/test" if key in ("current", "folder/1") else f"murmurate/test/epoch-{leader.epoch}"
    leader.claimed(Path("/runs/first"))
    first = in_thread(leader.gather)
    until(lambda: server.check(["murmurate/test/current"]))
    if key != "rank/1":
        one._enter(leader.epoch)
        one._register("a nonce")
        first()
        leader.announce(job(leader, "/runs/first"))
        true = server.get(f"{place}/{key}")
        server.set(f"{place}/{key}", true[:-1] + bytes([true[-1] ^ 1]))
        one = Rendezvous(around(server, 1))
        with pytest.raises(Refusal, match=r"rank 0 has another .* or a stranger has written"):
            Rendezvous(around(server, 0)).earlier_folder() if key == "folder/1" else one.join()
    else:
        AuthenticatedStore(server, place, b"").set(key, b"{}")
        with pytest.raises(Refusal, match=r"rank 1 has another .* or a stranger has written"):
            first()


def test_a_strangers_word_neither_ends_a_rank_nor_reports_its_death(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "_POLL_SECONDS", 0.0)
    monkeypatch.setenv("MURMURATE_SECRET", drawn_secret())
    leader, one = Rendezvous(around(server, 0)), Rendezvous(around(server, 1))
    one._enter(leader.epoch)
    stranger = AuthenticatedStore(server, f"murmurate/test/epoch-{leader.epoch}", b"")
    stranger.set("over", b"0")
    stranger.set("exit/1", b'{"how": "failed", "error": "says the stranger"}')
    assert leader.reported(1) is None
    looks = iter([False] * 100 + [True])
    with caplog.at_level(logging.WARNING):
        assert one.await_dismissal(lambda: next(looks)) is None
    assert 0 < sum("refused [store" in record.message for record in caplog.records) < 10, (
        "the log stays short"
    )
    leader.dismiss(3, deadline_seconds=0.0)
    assert one.await_dismissal(lambda: True) == 3


@pytest.mark.parametrize(
    "weak", ["secret", "x" * 64, "password" * 8, "0123456789abcdef" * 4, "correct horse battery"]
)
def test_a_secret_that_can_be_guessed_is_refused(weak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MURMURATE_SECRET", weak)
    no_store = Environment(0, 2, 1, "127.0.0.1", 1, 0, "none", True)
    for act in (fresh_secret, lambda: Rendezvous(no_store)):
        with pytest.raises(Refusal, match=r"MURMURATE_SECRET can be guessed: it .*murmurate secret"):
            act()


def test_a_printed_secret_is_a_good_one(capsys: pytest.CaptureFixture[str]) -> None:
    secrets = set()
    for _ in range(2):
        assert main(["secret"]) == 0
        secrets.add(capsys.readouterr().out.strip())
    assert len(secrets) == 2
    assert not any(weakness(text) for text in secrets)


def test_ranks_without_a_run_id_agree_on_a_drawn_one(server: TCPStore) -> None:
    def unnamed(rank: int) -> Environment:
        return dataclasses.replace(around(server, rank), run_id="none")

    one, leader, again = (Rendezvous(unnamed(rank)) for rank in (1, 0, 0))
    assert one.run_id == leader.run_id == again.run_id
    assert re.fullmatch("[0-9a-f]{16}", one.run_id)
    server.set("murmurate/run_id", "../../elsewhere")
    with pytest.raises(Refusal, match="a stranger has written"):
        Rendezvous(unnamed(0))
