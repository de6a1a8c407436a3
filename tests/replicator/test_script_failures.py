"""How replicas of a script end: errors, refusals, deaths, and those who end before the others."""

from __future__ import annotations

import os
import pickle
import signal
import sys

import pytest
import torch

import murmurate
from murmurate.errors import MissingExtra, Refusal, RunFailed
from murmurate.fabric.processes.spawn import Died
from murmurate.launch.script import run
from waiting import until


def one_breaks(loop):
    optimizer = loop.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    for step in range(10**9):  # without end, for whoever is not stopped
        if loop.rank == 1 and step == 3:
            raise LookupError("no such image")
        optimizer.step()


@pytest.mark.parametrize("launcher", ["local", "inline"])
@pytest.mark.parametrize("strategy", ["all-reduce", "gala"])
def test_who_raises_ends_all_and_its_traceback_is_told(launcher, strategy):
    with pytest.raises(RunFailed, match=r"(?s)replica 1 failed: LookupError: no such image.*in one_breaks"):
        run(one_breaks, replicas=2, strategy=strategy, launcher=launcher)


class OddError(Exception):
    """Its arguments are not its message, so it cannot be unpickled."""

    def __init__(self, code, why):
        super().__init__(f"{why} ({code})")


def breaks_oddly(loop):
    raise OddError(404, "no such image")


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_an_error_that_cannot_be_pickled_arrives_with_its_text_and_traceback(launcher):
    with pytest.raises(
        RunFailed, match=r"(?s)replica 0 failed: OddError: no such image \(404\).*in breaks_oddly"
    ):
        run(breaks_oddly, launcher=launcher)


@pytest.mark.parametrize(
    "error", [MissingExtra("ray", "ray", "the ray launcher"), Refusal("no"), RunFailed("a")]
)
def test_errors_of_the_package_are_the_same_after_pickling(error):
    """For executors that send exceptions themselves, such as Ray's and a process pool's."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))


def one_refuses(loop):
    loop.mean(torch.ones(1))


def test_a_refusal_in_a_member_is_a_refusal():
    with pytest.raises(Refusal, match=r"hogwild cannot give a collective.*Use all-reduce"):
        run(one_refuses, replicas=2, strategy="hogwild")


def one_is_killed(loop):
    net = torch.nn.Linear(2, 1)
    optimizer = loop.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(30):
        if loop.rank == 0 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if loop.rank and step == 5:
            until(lambda: 0 not in loop.fabric.living(), "the news of rank 0's death")
    return loop.is_main, sys.stdout.is_main(), optimizer.last.round


def test_the_others_go_on_without_one_that_is_killed():
    dead, *others = run(one_is_killed, replicas=3)
    assert dead == murmurate.Died(0, -signal.SIGKILL)
    assert others == [(True, True, 30), (False, False, 30)]  # rank 1 prints and saves now


def all_are_killed(loop):
    os.kill(os.getpid(), signal.SIGKILL)


def stop(loop):
    if loop.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return loop.rank


def test_who_is_stopped_holds_up_nobody_who_has_finished():
    result = murmurate.run(stop, replicas=3, strategy="gala", deadline_seconds=2.0)
    assert result == [0, murmurate.Died(1, -signal.SIGKILL), 2]


def test_if_all_are_killed_the_run_failed():
    with pytest.raises(RunFailed, match=r"all replicas ended without a result \(exit codes -9\)"):
        run(all_are_killed, replicas=1)


def ends_early(loop):
    optimizer = loop.wrap_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    for _ in range(5 if loop.rank else 15):
        optimizer.step()
    return loop.is_main, optimizer.last.heard


def test_who_ends_early_holds_nobody_up():
    """A loop without ``inputs``: rank 0 goes on alone, and stays the one that saves."""
    (main, heard), (other, _) = run(ends_early, replicas=2, deadline_seconds=20.0)
    assert (main, heard, other) == (True, 1, False)


def returns_a_function(loop):
    return lambda: loop


def test_a_result_that_cannot_travel_is_an_error_that_says_so():
    with pytest.raises(RunFailed, match="replica 0 failed: its result cannot be sent back"):
        run(returns_a_function)


def exits(loop, code=0):
    raise SystemExit(code)


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_an_exit_with_code_0_is_an_end_without_result(launcher):
    assert run(exits, replicas=2, launcher=launcher) == [None, None]


def exits_with_3(loop):
    exits(loop, 3)


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_an_exit_with_another_code_is_a_failure(launcher):
    with pytest.raises(RunFailed, match="replica 0 failed: SystemExit: 3"):
        run(exits_with_3, launcher=launcher)


def one_vanishes(loop):
    if loop.rank:
        import os

        os._exit(0)


def test_the_exit_code_of_a_process_that_vanished_is_told():
    assert run(one_vanishes, replicas=2) == [None, Died(1, 0)]
