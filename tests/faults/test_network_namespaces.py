"""Two hosts, as far as the kernel is concerned: a link with delay and loss that is cut and comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from faults.namespaces import ADDRESSES, Bridged, Cabled, why_not
from waiting import until

SIZE = 4
_TESTS = Path(__file__).parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _progress(folder, rank):
    """(deltas sent, who lives, deltas heard), or None while it is being written."""
    try:
        return json.loads((folder / f"{rank}.progress").read_text())
    except (OSError, ValueError):
        return None


def _through_a_cut(script, sides, cut_seconds, tmp_path, learners):
    """Run ``script`` a rank with the connection cut for a while; what the ranks have written at the end.

    sides: where each rank is. learners: the first so many tell of their progress.
    """
    reason = why_not()
    if reason:
        pytest.skip(reason)
    size = len(sides)
    cable = Cabled(delay_seconds=0.01, loss=0.01, seed=0)
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{_TESTS}"}
    replicas = []
    try:
        for rank, side in enumerate(sides):
            words = [cable.names[side], ADDRESSES[side], str(rank), str(size), str(tmp_path)]
            command = [sys.executable, str(_TESTS / "faults" / script), *words]
            with (tmp_path / f"{rank}.log").open("w") as log:
                replicas.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

        def told(rank):
            return _progress(tmp_path, rank)

        def all_at(steps):
            assert all(replica.poll() is None for replica in replicas), "a replica ended early"
            return all((p := told(rank)) and p[0] >= steps for rank in range(learners))

        def all_see(living):
            return all((p := told(rank)) and p[1] == living(rank) for rank in range(learners))

        def all_heard_more_than(then):
            return all((p := told(rank)) and p[2] > then[rank][2] for rank in range(learners))

        until(lambda: all_at(30), "the first steps")
        cable.whole = False
        began = time.monotonic()
        own_side = {rank: [r for r in range(size) if sides[r] == sides[rank]] for rank in range(size)}
        until(lambda: all_see(own_side.get), "notice of the cut", cut_seconds)
        before = [told(rank) for rank in range(learners)]
        while time.monotonic() - began < cut_seconds:
            time.sleep(0.1)
        until(lambda: all_at(max(p[0] for p in before) + 5), "a step during the cut")
        during = [told(rank) for rank in range(learners)]
        cable.whole = True
        until(lambda: all_see(lambda _: list(range(size))), "the return of the other side")
        until(lambda: all_at(max(p[0] for p in during) + 5), "steps after the return")
        until(lambda: all_heard_more_than(during), "news after the return")
        after = [told(rank) for rank in range(learners)]
        (tmp_path / "stop").touch()
        for replica in replicas:
            assert replica.wait(120) == 0
    except BaseException:
        for rank in range(size):
            print((tmp_path / f"{rank}.log").read_text())
        raise
    finally:
        for replica in replicas:
            replica.kill()
            replica.wait()
        cable.close()
    assert cable.lost > 0
    outcomes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    return outcomes, (before, during, after)


@pytest.mark.parametrize("cut_seconds", [5, 20])
def test_gossip_and_deltas_over_a_bad_link_that_is_cut(cut_seconds, tmp_path):
    sides = [0, 0, 1, 1]
    outcomes, _ = _through_a_cut("replica_in_namespace.py", sides, cut_seconds, tmp_path, SIZE)
    _check(outcomes)


def test_dpsgd_over_a_bad_link_that_is_cut(tmp_path):
    """Four nodes of one, two on each host, and the master on the first: the far side learns on alone."""
    outcomes, told = _through_a_cut("dpsgd_in_namespace.py", [0, 0, 1, 1, 0], 20, tmp_path, 4)
    *nodes, master = outcomes
    before, during, after = ([p[2] for p in moment] for moment in told)
    for near in (0, 1):
        assert during[near] > before[near], "who can reach the master goes on with it"
    for far in (2, 3):
        assert during[far] <= before[far] + 1, "there was no answer to be had"
        assert after[far] > during[far], "and there was again"
    assert all(outcome["drained"] for outcome in outcomes)
    # each update that was pushed counts once, and nothing else does
    moved = sum(torch.tensor(node["pushed"], dtype=torch.float64) for node in nodes) / 4
    torch.testing.assert_close(torch.tensor(master["v"], dtype=torch.float64), moved, rtol=1e-9, atol=1e-9)
    assert master["clock"] == sum(node["pushes"] for node in nodes)
    assert all(outcome["shown"] == master["v"] for outcome in outcomes)
    assert all(not set(outcome["refused"]) - {"truncated", "handshake"} for outcome in outcomes)
    assert abs(moved.item() - 1.5) < 0.5, "it is near the mean of the targets 0 to 3"


@pytest.mark.parametrize("how", ["encrypted", "plain"])
def test_no_member_of_eight_carries_more_than_two_and_a_half_vectors_a_round(how, tmp_path):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    size, count, rounds = 8, 500_000, 5
    bridge = Bridged(size)
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{_TESTS}"}
    replicas = []
    try:
        for rank, name in enumerate(bridge.names):
            words = [name, bridge.address(rank), rank, size, tmp_path, count, rounds, how]
            command = [sys.executable, str(_TESTS / "faults" / "mean_in_namespace.py"), *map(str, words)]
            with (tmp_path / f"{rank}.log").open("w") as log:
                replicas.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        ended = [replica.wait(200) for replica in replicas]
        assert ended == [0] * size, [(tmp_path / f"{rank}.log").read_text() for rank in range(size)]
    finally:
        for replica in replicas:
            replica.kill()
            replica.wait()
        bridge.close()
    vectors = []
    for rank in range(size):
        received, sent, first, asked = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (first, asked) == ((size - 1) / 2 + rounds - 1, 0)
        vectors += [received / (4 * count * rounds), sent / (4 * count * rounds)]
    print(f"{how}: {min(vectors):.2f} to {max(vectors):.2f} vectors a member, direction and round")
    assert max(vectors) < 2.5


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
        assert outcome["apart_before"] > 0.01, "there is something to mix"
        assert outcome["apart_after"] < 0.01 * outcome["apart_before"]
