"""Connects to a Ray cluster, or starts one, and reserves resources for all members in it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch

from murmurate.errors import MissingExtra, Refusal, cause_of
from murmurate.plugins import IMPORTS
from murmurate.training.run import Run

_CONNECT_SECONDS = 20.0  # how long to wait for a cluster that is just starting
_PLACE_SECONDS = 60.0  # how long to wait for the cluster to reserve resources
# Longest path, in bytes, of the folder of temporary files: a socket's path may have 107, and 77 of them are
# "/mray" and 8 characters, "/session_", date, time and process id (43 in all), and "/sockets/plasma_store".
_LONGEST_FOLDER = 30
_RAY_UNITS = 10_000  # the smallest share of a resource that Ray counts is 1/10,000


def import_ray() -> Any:
    """The package ray. Raises MissingExtra where it is not installed."""
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray", "the ray launcher") from None
    return ray


@contextlib.contextmanager
def cluster(cores_needed: int) -> Iterator[Any]:
    """Ray, connected to a cluster: the one to which this process is connected already; else the one at
    RAY_ADDRESS; else a new one on this host, which claims to have at least ``cores_needed`` cores.

    Raises MissingExtra where Ray is not installed, and Refusal if there is no cluster at RAY_ADDRESS.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    temp_folder = None
    try:
        terminate = signal.getsignal(signal.SIGTERM)
        if address := os.environ.get("RAY_ADDRESS"):
            _connect(ray, address)
        else:
            parent = None if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER else "/tmp"
            temp_folder = tempfile.mkdtemp(prefix="mray", dir=parent)
            cores = max(psutil.cpu_count() or 1, cores_needed)
            ray.init(
                address="local",
                num_cpus=cores,
                object_store_memory=100 * 2**20,
                _temp_dir=temp_folder,
                **quiet,
            )
        # Ray's own raises SystemExit, after which the folder of a run that had not begun would stay
        if callable(terminate) and signal.getsignal(signal.SIGTERM) is not terminate:
            signal.signal(signal.SIGTERM, terminate)
        yield ray
    finally:
        ray.shutdown()
        if temp_folder is not None:
            shutil.rmtree(temp_folder, ignore_errors=True)


def _connect(ray: Any, address: str) -> None:
    try:
        _await_listener(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise Refusal(
            f"this process cannot connect to a Ray cluster at {address} ({first_line(error)}). Start one "
            "with: ray start --head; give both the same RAY_AUTH_TOKEN where Ray asks for one; or unset "
            "RAY_ADDRESS for a Ray of this host alone."
        ) from error


def _await_listener(address: str) -> None:
    """Wait until a process listens at ``address``, if that is a host and a port; Ray itself would try for
    minutes. Raises OSError or ValueError if none does."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    until = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
            return
        except (OSError, OverflowError, UnicodeError) as error:
            if time.monotonic() > until or not isinstance(error, OSError):
                raise ConnectionError(cause_of(error)) from error
        time.sleep(0.2)


def environment(threads: int) -> dict[str, str]:
    """The variables of an actor's process, on whatever node it is."""
    imports = {IMPORTS: os.environ[IMPORTS]} if os.environ.get(IMPORTS) else {}
    return {"OMP_NUM_THREADS": str(threads)} | imports


def bundle(run: Run, rank: int) -> dict[str, float]:
    """The ``resources`` that the member ``rank`` of ``run`` needs. A centre needs no GPU."""
    learners = [run.device(replica) for replica in range(run.replicas)]
    return resources(run.device(rank), learners, run.placement.threads)


def resources(device: torch.device, learners: Sequence[torch.device], threads: int) -> dict[str, float]:
    """Cores for a member's threads and, if its ``device`` is a GPU, a share of that GPU.

    learners: the devices of all replicas. The share is 1/k for a whole number k, so that k replicas fit on
    each GPU, and no more GPUs are needed than ``learners`` names.
    """
    cores = {"CPU": float(threads)}
    on_gpus = [learner for learner in learners if learner.type == "cuda"]
    if device.type != "cuda":
        return cores
    sharers = math.ceil(len(on_gpus) / len(set(on_gpus)))
    # rounded down to Ray's unit: k shares that were rounded up would be more than a GPU
    return cores | {"GPU": math.floor(_RAY_UNITS / sharers) / _RAY_UNITS}


def place(ray: Any, bundles: Sequence[dict[str, float]], *, use_fewer: str) -> Any:
    """Reserve resources for all members, close together. Raises Refusal if they do not become free in time.

    use_fewer: what the message of the Refusal advises to use fewer of.
    """
    group = ray.util.placement_group(list(bundles), strategy="PACK")
    try:
        is_placed = group.wait(timeout_seconds=_PLACE_SECONDS)
    except BaseException:  # as by Ctrl-C: in a cluster that goes on, the resources would stay reserved
        ray.util.remove_placement_group(group)
        raise
    if not is_placed:
        ray.util.remove_placement_group(group)
        free = {kind: ray.available_resources().get(kind, 0) for bundle in bundles for kind in bundle}
        raise Refusal(
            f"the Ray cluster found no room for {len(bundles)} members of "
            f"{' or '.join(dict.fromkeys(map(str, bundles)))} each within {_PLACE_SECONDS:g} s; "
            f"free are {free}. Use fewer {use_fewer}, or add nodes."
        )
    return group


def start_actor(ray: Any, kind: type, group: Any, rank: int, share: dict[str, float], threads: int) -> Any:
    """Start an actor of the class ``kind``, with its ``share`` of resources, which ``place`` has reserved for
    ``rank``."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actor = ray.remote(kind).options(
        num_cpus=share["CPU"],
        num_gpus=share.get("GPU", 0),
        max_restarts=0,  # restarted by Ray itself, it would not know what the first had learned
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        runtime_env={"env_vars": environment(threads)},
    )
    return actor.remote()


def first_line(error: BaseException) -> str:
    """The first line of the error's message, or its type if that is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
