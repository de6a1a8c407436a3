"""Two hosts, as far as the kernel is concerned: a link with delay and loss that is cut and comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.namespaces import ADDRESSES, Cabled, why_not

SIZE = 4
_TESTS = Path(__file__).parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _progress(folder, rank):
    """(deltas sent, who lives, deltas heard), or None while it is being written."""
    try:
        return json.loads((folder / f"{rank}.progress").read_text())
    except (OSError, ValueError):
        return None


def _until(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {seconds} s"
        time.sleep(0.05)


@pytest.mark.parametrize("cut_seconds", [5, 20])
def test_gossip_and_deltas_over_a_bad_link_that_is_cut(cut_seconds, tmp_path):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    cable = Cabled(delay_seconds=0.01, loss=0.01, seed=0)
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{_TESTS}"}
    replicas = []
    try:
        for rank in range(SIZE):
            side = rank // 2
            words = [cable.names[side], ADDRESSES[side], str(rank), str(SIZE), str(tmp_path)]
            command = [sys.executable, str(_TESTS / "faults" / "replica_in_namespace.py"), *words]
            with (tmp_path / f"{rank}.log").open("w") as log:
                replicas.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

        def all_at(steps):
            assert all(replica.poll() is None for replica in replicas), "a replica ended early"
            return all((p := _progress(tmp_path, rank)) and p[0] >= steps for rank in range(SIZE))

        _until(lambda: all_at(30), 60, "the first steps")
        cable.whole = False
        began = time.monotonic()
        sides = [[0, 1], [0, 1], [2, 3], [2, 3]]
        _until(
            lambda: all((p := _progress(tmp_path, r)) and p[1] == sides[r] for r in range(SIZE)),
            cut_seconds,
            "notice of the cut",
        )
        before = [_progress(tmp_path, rank)[0] for rank in range(SIZE)]
        while time.monotonic() - began < cut_seconds:
            time.sleep(0.1)
        _until(lambda: all_at(max(before) + 5), 10, "a step during the cut")
        cable.whole = True
        everybody = list(range(SIZE))
        _until(
            lambda: all((p := _progress(tmp_path, r)) and p[1] == everybody for r in range(SIZE)),
            30,
            "the return of the other side",
        )
        (tmp_path / "stop").touch()
        for replica in replicas:
            assert replica.wait(120) == 0
    except BaseException:
        for rank in range(SIZE):
            print((tmp_path / f"{rank}.log").read_text())
        raise
    finally:
        for replica in replicas:
            replica.kill()
            replica.wait()
        cable.close()
    assert cable.lost > 0
    _check([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(SIZE)])


def _check(outcomes):
    sent = [outcome["sent"] for outcome in outcomes]
    total = float(sum((rank + 1) * count for rank, count in enumerate(sent)))
    for rank, outcome in enumerate(outcomes):
        assert outcome["total"] == [total], "a delta was lost, or came twice"
        assert outcome["order"], "deltas out of order"
        assert outcome["expected"] == {str(r): sent[r] for r in range(SIZE) if r != rank}
        own = [0, 1] if rank < 2 else [2, 3]
        assert own in outcome["living"]
        assert outcome["living_at_the_end"] == list(range(SIZE))
        far = [r for r in range(SIZE) if r not in own]
        assert all(outcome["connections"][str(r)] >= 2 for r in far)
        near = own[1 - own.index(rank)]
        assert outcome["connections"][str(near)] == 1
        assert not set(outcome["refused"]) - {"truncated", "handshake"}, "the cut may end a message only"
        assert outcome["apart_before"] > 0.1
        assert outcome["apart_after"] < 0.01 * outcome["apart_before"]
