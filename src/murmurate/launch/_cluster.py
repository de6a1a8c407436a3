"""The Ray cluster that a run is on: found or begun, and with room for all members in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import psutil

from murmurate.errors import MissingExtra, Refusal
from murmurate.run_spec import Run

_PLACE_SECONDS = 60.0  # for the cluster to find room


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


def bundle(run: Run) -> dict[str, float]:
    """What one member holds: its threads' cores, and its share of a GPU where the placement names any."""
    gpus = {name for name in run.placement.devices if name.startswith("cuda")}
    share = {"GPU": min(1.0, len(gpus) / run.replicas)} if gpus else {}
    return {"CPU": float(run.placement.threads), **share}


def place(ray: Any, run: Run) -> Any:
    """Room for all members, close together. Raises Refusal, with the room that there is."""
    group = ray.util.placement_group([bundle(run)] * run.members, strategy="PACK")
    if not group.wait(timeout_seconds=_PLACE_SECONDS):
        ray.util.remove_placement_group(group)
        free = {kind: ray.available_resources().get(kind, 0) for kind in bundle(run)}
        raise Refusal(
            f"the cluster at {socket.gethostname()} found no room for {run.members} members of "
            f"{bundle(run)} each within {_PLACE_SECONDS:g} s; free are {free}. "
            "Use fewer --replicas or --placement.threads, or add nodes."
        )
    return group


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
