"""Two learners of a replay service on two hosts, as far as the kernel is concerned, 10 ms apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.namespaces import ADDRESSES, Cabled, why_not
from faults.service_in_namespace import PLAN
from waiting import DEADLINE_SECONDS, until

_TESTS = Path(__file__).parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE_SECONDS)]


_SILENCE_SECONDS = 20.0  # after which a connection without a byte is made again


@pytest.mark.parametrize("cut_seconds", [0.0, _SILENCE_SECONDS + 5.0])
def test_learners_on_two_hosts_draw_from_the_shards_of_both(cut_seconds, tmp_path):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    cable = Cabled(delay_seconds=0.01, loss=0.0, seed=0)
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{_TESTS}"}
    learners = []
    try:
        for rank, side in enumerate((0, 1)):
            words = [
                cable.names[side],
                ADDRESSES[side],
                str(rank),
                "2",
                str(tmp_path),
                str(5.0 + 2 * cut_seconds),
            ]
            command = [sys.executable, str(_TESTS / "faults" / "service_in_namespace.py"), *words]
            with (tmp_path / f"{rank}.log").open("w") as log:
                learners.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        if cut_seconds:
            until(lambda: cable.carried > 3_000, "draws over the link")
            cable.whole = False
            time.sleep(cut_seconds)
            cable.whole = True
        ends = [learner.wait(DEADLINE_SECONDS) for learner in learners]
        assert ends == [0, 0], "".join((tmp_path / f"{rank}.log").read_text() for rank in (0, 1))
    finally:
        for learner in learners:
            learner.kill()
            learner.wait()
        cable.close()
    assert (cable.lost > 0) == (cut_seconds > 0)
    counts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    totals = {name: sum(count[name] for count in counts) for name in counts[0]}
    assert totals["lost_inserts"] == totals["doubled_inserts"] == 0
    assert totals["stored"] == totals["inserted"] == totals["acknowledged"]
    assert totals["drawn"] == totals["handed"] + totals["waiting_draws"]
    assert totals["actor_deaths"] == totals["sampler_deaths"] == 2 * PLAN.kills
    # half of each batch came over the link
    assert all(count["drawn"] > 0.4 * totals["drawn"] for count in counts)
    assert cable.carried * 1400 > 0.4 * totals["drawn"] * 4 * 17
