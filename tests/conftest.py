"""Fixtures of more than one file."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# each of the many processes that tests start would compile the package again, and each worker all tests
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# before anything imports Triton, which decides then: without a GPU its interpreter runs the kernels
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
with contextlib.suppress(ImportError):
    import triton  # noqa: F401  # after Mesa, which brings another LLVM, its import crashes

from murmurate.cli.main import main
from murmurate.fabric.processes import fork_server, spawn
from murmurate.launch import script_local
from short_runs import SHORT

hypothesis.settings.register_profile("any-machine", deadline=None)  # no test asserts a wall-clock time
hypothesis.settings.load_profile("any-machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """All tests, and the modules that they import, stay to the end: to search them for garbage took a fifth
    of the time that each worker needs to collect them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _without_waiting_for_the_disk() -> Iterator[None]:
    """Tests end processes and never the system: a short run would wait for the disk some sixty times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _with_a_fork_server_for_all() -> Iterator[None]:
    """It imports what any test's processes need, whichever test starts it: the members of a script would each
    take 1.6 s to import what optimizers need, if a run has started it before."""
    preload = (*fork_server.PRELOADED_BY_RUNS, *spawn._PRELOADED, *script_local._PRELOADED)
    start = fork_server._ensure_running
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_ensure_running", lambda _, forks=False: start(preload, forks))
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main(["train", "cartpole-gala", *SHORT, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))
