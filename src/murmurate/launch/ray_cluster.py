"""Connects to or starts the Ray cluster of a run, and reserves resources for all members in it."""

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
    """Ray, connected: as this process already is, to RAY_ADDRESS, or to a new cluster on this host."""
    ray = imported()
    if ray.is_initialized():
        yield ray
        return
    quiet = {"include_dashboard": False} | {"log_to_driver": False, "logging_level": "ERROR"}
    temp_folder = None
    try:
        if address := os.environ.get("RAY_ADDRESS"):
            _connect(ray, address)
        else:
            temp_folder = tempfile.mkdtemp(prefix="mray")  # short: Ray puts sockets below it
            cores = max(psutil.cpu_count() or 1, run.members * run.placement.threads)
            ray.init(
                address="local",
                num_cpus=cores,
                object_store_memory=100 * 2**20,
                _temp_dir=temp_folder,
                **quiet,
            )
        yield ray
    finally:
        ray.shutdown()
        if temp_folder is not None:
            shutil.rmtree(temp_folder, ignore_errors=True)


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
    """The resources of ``rank``: cores for its threads and, for a replica that the placement puts on a GPU, a
    share of that GPU.

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
    """Reserve resources for all members, close together. Raises Refusal, naming the free resources."""
    bundles = [bundle(run, rank) for rank in range(run.members)]
    group = ray.util.placement_group(bundles, strategy="PACK")
    if not group.wait(timeout_seconds=_PLACE_SECONDS):
        ray.util.remove_placement_group(group)
        free = {kind: ray.available_resources().get(kind, 0) for resources in bundles for kind in resources}
        raise Refusal(
            f"the cluster at {socket.gethostname()} found no room for {run.members} members of "
            f"{' or '.join(dict.fromkeys(map(str, bundles)))} each within {_PLACE_SECONDS:g} s; "
            f"free are {free}. Use fewer --replicas or --placement.threads, or add nodes."
        )
    return group


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
