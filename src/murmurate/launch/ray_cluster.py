"""The Ray cluster that a run is on: found or begun, and with room for all members in it."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import psutil

from murmurate.errors import MissingExtra, Refusal
from murmurate.training.run import Run

_PLACE_SECONDS = 60.0  # for the cluster to find room
_RAY_UNITS = 10_000


def imported() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray", "the ray launcher") from None
    return ray


@contextlib.contextmanager
def cluster(run: Run) -> Iterator[Any]:
    """Ray, connected: to what this process is connected to, to RAY_ADDRESS, or to one of our own."""
    ray = imported()
    if ray.is_initialized():
        yield ray
        return
    quiet = {"include_dashboard": False} | {"log_to_driver": False, "logging_level": "ERROR"}
    own = None
    try:
        if address := os.environ.get("RAY_ADDRESS"):
            _connect(ray, address)
        else:
            own = tempfile.mkdtemp(prefix="mray")  # short: Ray puts sockets below it
            cores = max(psutil.cpu_count() or 1, run.members * run.placement.threads)
            ray.init(address="local", num_cpus=cores, object_store_memory=100 * 2**20, _temp_dir=own, **quiet)
        yield ray
    finally:
        ray.shutdown()
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise Refusal(
            f"no Ray cluster at {address} lets this process in ({first_line(error)}). Start one with: "
            "ray start --head; give both the same RAY_AUTH_TOKEN where Ray asks for one; or unset "
            "RAY_ADDRESS for a Ray of this host alone."
        ) from error


def bundle(run: Run, rank: int) -> dict[str, float]:
    """What ``rank`` holds: its threads' cores, and a replica that the placement puts on a GPU a share of one.

    The share is 1/k for a whole number k, so that k replicas fit on each GPU, and no more GPUs are needed
    than the placement names. A centre has no GPU.
    """
    cores = {"CPU": float(run.placement.threads)}
    on_gpus = [name for name in map(run.device, range(run.replicas)) if name.type == "cuda"]
    if run.device(rank).type != "cuda":
        return cores
    sharers = math.ceil(len(on_gpus) / len(set(on_gpus)))
    # Ray counts in ten thousandths: k shares that were rounded up would be more than a GPU
    return cores | {"GPU": math.floor(_RAY_UNITS / sharers) / _RAY_UNITS}


def place(ray: Any, run: Run) -> Any:
    """Room for all members, close together. Raises Refusal, with the room that there is."""
    bundles = [bundle(run, rank) for rank in range(run.members)]
    group = ray.util.placement_group(bundles, strategy="PACK")
    if not group.wait(timeout_seconds=_PLACE_SECONDS):
        ray.util.remove_placement_group(group)
        free = {kind: ray.available_resources().get(kind, 0) for held in bundles for kind in held}
        raise Refusal(
            f"the cluster at {socket.gethostname()} found no room for {run.members} members of "
            f"{' or '.join(dict.fromkeys(map(str, bundles)))} each within {_PLACE_SECONDS:g} s; "
            f"free are {free}. Use fewer --replicas or --placement.threads, or add nodes."
        )
    return group


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
