"""Two hosts, as far as the kernel is concerned, with and without the secret, and a stranger between them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil
import pytest

from faults.namespaces import Bridged, why_not
from murmurate.launch.secret import drawn_secret
from waiting import DEADLINE_SECONDS, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_PORT = 29517
_RUN = ("cartpole-gala", "--strategy", "gala", "--updates", 20, "--simulators", 4, "--eval-episodes", 1)
_STRANGER = """
import contextlib, sys, time
from torch.distributed import TCPStore
place, port, act = sys.argv[1], int(sys.argv[2]), sys.argv[3]
store = None
while store is None:
    with contextlib.suppress(RuntimeError):
        store = TCPStore(place, port, is_master=False, wait_for_workers=False)
seen, changed = {}, 0
while True:
    with contextlib.suppress(RuntimeError):
        for key in store.list_keys():
            if "murmurate" not in key or key.endswith("run_id"):
                continue
            value = store.get(key)
            if act == "replays" and "run_state" in key:
                first = seen.setdefault(key, value)
                if first == value:
                    continue
                store.set(key, first)
            elif act == "flips" and "rank/1" in key and value not in seen.values():
                seen[key] = value[:-2] + bytes([value[-2] ^ 1]) + value[-1:]
                store.set(key, seen[key])
            elif act == "stops" and key.endswith("run_state/launcher") and value not in seen.values():
                # the first cell of the header is the request to stop
                seen[key] = value[:40] + (1).to_bytes(8, "little") + value[48:]
                store.set(key, seen[key])
            else:
                continue
            changed += 1
            print(changed, flush=True)
    time.sleep(0.01 if act == "flips" else 0.3)
"""


class Hosts:
    """torchrun on two hosts: a namespace of networks and one of processes each; and room for a stranger."""

    def __init__(self, folder, secrets, fields=()):
        self.folder = folder
        self.bridge = Bridged(3)
        self.started = []
        self.processes = [self._torchrun(rank, secret, fields) for rank, secret in enumerate(secrets)]

    def _torchrun(self, rank, secret, fields):
        engine = ("--nnodes", 2, "--nproc-per-node", 1, "--node-rank", rank)
        where = ("--master-addr", self.bridge.address(0), "--master-port", _PORT)
        run = ("train", *_RUN, "--stop-at-return", "none", "--out", self.folder / "run", *fields)
        words = ("torch.distributed.run", *engine, *where, "-m", "murmurate", *run, "--launcher", "torchrun")
        return self.start(rank, str(rank), "-m", *words, MURMURATE_SECRET=secret)

    def start(self, rank, name, *words, **environment):
        host = ["ip", "netns", "exec", self.bridge.names[rank]]
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [*host, *apart, sys.executable, *map(str, words)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def said(self, name):
        return (self.folder / f"{name}.log").read_text()

    def wait(self):
        return [process.wait(DEADLINE_SECONDS) for process in self.processes]

    def close(self):
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            process.kill()
            process.wait()
        self.bridge.close()


@contextlib.contextmanager
def hosts(folder, secrets, fields=()):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    both = Hosts(folder, secrets, fields)
    try:
        yield both
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            print(f"{log.name}: {log.read_text()[-3000:]}")
        raise
    finally:
        both.close()


@pytest.mark.parametrize(("first", "second"), [(False, False), (True, True), (True, False), (False, True)])
def test_hosts_with_and_without_the_secret(first, second, tmp_path):
    secret = drawn_secret()
    with hosts(tmp_path, [secret * first, secret * second]) as both:
        began = time.monotonic()
        codes = both.wait()
        print(f"secret {first} and {second}: {codes} after {time.monotonic() - began:.1f} s")
        if first == second:
            assert codes == [0, 0]
            assert (tmp_path / "run/summary.json").exists()
            said = " ".join(both.said(0).split())
            assert f"the store of torchrun listens on :: port {_PORT}" in said
            assert ("MURMURATE_SECRET is not set" in said) is not first
            return
        assert all(codes)
        assert "rank 1 (process " in both.said(0)
        assert "has another MURMURATE_SECRET than rank 0, or none" in both.said(0)
        assert "rank 0 has another MURMURATE_SECRET than rank 1, or none" in both.said(1)
        assert not any("murmurate/launch/" in both.said(rank) for rank in "01"), "no traceback of ours"
        assert not (tmp_path / "run").exists(), "refused before anything changed"


@pytest.mark.parametrize("act", ["replays", "stops"])
def test_a_stranger_who_rewrites_the_run_state_changes_nothing(act, tmp_path):
    secret = drawn_secret()
    fields = ("--updates", 400)
    with hosts(tmp_path, [secret, secret], fields) as both:
        both.start(2, "stranger", "-c", _STRANGER, both.bridge.address(0), _PORT, act)
        assert both.wait() == [0, 0]
        assert both.said("stranger"), "he did his worst"
        assert "was not written with this run's secret" in both.said(1) + both.said(0) or act == "replays"
        assert '"exit": "finished"' in (tmp_path / "run/summary.json").read_text()
        until(lambda: '"updates": 400' in (tmp_path / "run/summary.json").read_text())


def test_a_stranger_who_rewrites_a_registration_gets_a_refusal(tmp_path):
    secret = drawn_secret()
    with hosts(tmp_path, [secret, secret]) as both:
        both.start(2, "stranger", "-c", _STRANGER, both.bridge.address(0), _PORT, "flips")
        codes = both.wait()
        # he may come too late: then nothing has changed
        assert codes == [0, 0] or ("or a stranger has written into the store" in both.said(0) and all(codes))
