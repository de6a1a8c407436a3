"""``bench replay``: every task that it asks of us can be done, and what becomes of a library that fails."""

from __future__ import annotations

from typing import Any

import pytest

from murmurate.bench import _replay_server, replay
from murmurate.errors import RunFailed

CASE = replay.ReplayCase("sample", 2**20, 256)
PLAN = replay.ReplayPlan(rounds=3)


class _Server:
    """Answers the rounds in turn."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self._answers = iter(answers)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return {} if request.get("forget") else next(self._answers)


def race(log: list[str], **servers: _Server) -> replay.Times:
    return replay._race(servers, CASE, PLAN, log.append)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", sorted({case.task for case in replay.FULL.cases}))
def test_every_task_can_be_done(task: str) -> None:
    call = _replay_server.make(task, 2**10, 32)
    if call is None:
        assert task == "bound"
    else:
        for _ in range(3):
            call()


def test_a_peer_that_fails_once_is_left_out_of_the_case_and_the_log_says_why() -> None:
    log: list[str] = []
    peer = _Server({"seconds": 2.0}, {"failed": "torchrl: MemoryError: no room"}, {"seconds": 2.0})
    lacking = _Server(*[{"missing": "cpprb has no sample"}] * 3)
    times = race(log, murmurate=_Server(*[{"seconds": 1.0}] * 3), torchrl=peer, cpprb=lacking)
    assert times == {"murmurate": [1.0, 1.0, 1.0]}
    assert log[0] == "sample n=2^20 b=256: left out: torchrl: MemoryError: no room"
    assert len(log) == 2


def test_where_ours_fails_the_bench_does() -> None:
    with pytest.raises(RunFailed, match=r"sample n=2\^20 b=256: murmurate: TypeError: no such argument"):
        race([], murmurate=_Server(*[{"failed": "murmurate: TypeError: no such argument"}] * 3))
