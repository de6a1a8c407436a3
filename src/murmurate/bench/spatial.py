"""Spatially parallel layers (Jin 2018, chapter 4): are they exact, and what do two parts cost?"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from murmurate.bench import _dtensor
from murmurate.bench._result import Log, ratios, spread
from murmurate.bench._spatial_layers import drawn_layers
from murmurate.bench._spatial_nets import ResNet18, UNet, error_of_step
from murmurate.bench._spatial_timing import Case, timed
from murmurate.ranges import NonNegativeInt, PositiveInt

NAME = "spatial"
SUMMARY = "spatially parallel layers: errors against the whole, memory and speed of two parts, beside DTensor"


@dataclass(frozen=True)
class SpatialPlan:
    """layers: number of drawn layers whose errors are measured. peer_layers: number of convolutions drawn for
    the comparison with DTensor. size: side of the images on which two parts are timed. channels: number of
    channels of these images. batch: number of these images. net_size: side of the images on which a
    training step of whole nets is timed.

    rounds: number of rounds of timing.
    """

    layers: PositiveInt = 500
    peer_layers: NonNegativeInt = 60
    rounds: PositiveInt = 9
    size: PositiveInt = 512
    channels: PositiveInt = 64
    batch: PositiveInt = 1
    net_size: PositiveInt = 256


# name -> what makes the net whose step is timed, and that whose errors are measured, on images of which size
NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, int]]] = {
    "resnet18": (functools.partial(ResNet18, 64), ResNet18, (67, 64)),
    "unet": (functools.partial(UNet, 32), UNet, (37, 41)),
}

QUICK, FULL = SpatialPlan(), SpatialPlan(layers=2000, peer_layers=200, rounds=31)


def measure(plan: SpatialPlan, log: Log) -> dict[str, Any]:
    """Errors are those of the output and of the gradients of input, weight and bias, in float64, relative to
    the largest number of each tensor (or 1); of whole nets in four parts, those of the loss, the gradients of
    all parameters and the running statistics. Speed-ups are of forward and backward pass together, of two
    parts on two cores over the whole on one; by wall time, and by CPU time of the slower part, which other
    work on the machine changes less."""
    log(f"{plan.layers} drawn layers over 2 to 6 parts")
    drawn = drawn_layers(plan.layers)
    worst, error = max(drawn, key=lambda pair: pair[1])
    peer = {}
    if plan.peer_layers:
        log(f"{plan.peer_layers} convolutions by DTensor")
        peer = _dtensor.compared(plan.peer_layers, log)
    log("a step of whole nets over 4 parts")
    net_errors = {name: error_of_step(make, size, (2, 2)) for name, (_, make, size) in NETS.items()}
    cases = {
        name: Case(plan.size, (2, 1), dilation, channels=plan.channels, batch=plan.batch)
        for name, dilation in (("plain", 1), ("dilated", 3))
    }
    for name, (make, _, _) in NETS.items():
        cases[name] = Case(plan.net_size, (2, 1), batch=plan.batch, net=make)
    timings: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        log(f"two parts: {name}")
        whole, split = timed(case, plan.rounds)
        timings[name] = {
            "memory_share": split.activation_bytes / whole.activation_bytes,
            "forward": spread(ratios(whole.forward, split.forward)),
            "backward": spread(ratios(whole.backward, split.backward)),
            "both": spread(ratios(whole.both, split.both)),
            "whole_seconds": spread(whole.both),
            "parts_seconds": spread(split.both),
            "both_by_cpu": spread(ratios(whole.cpu, split.cpu)),
        }
    return {
        "largest_error_float64": error,
        "layers": len(drawn),
        "largest_error_nets": net_errors,
        "memory_share_2": max(timings[name]["memory_share"] for name in ("plain", "dilated")),
        "speedup_2": timings["plain"]["both"]["median"],
        "speedup_2_dilated": timings["dilated"]["both"]["median"],
        "speedup_2_by_cpu": timings["plain"]["both_by_cpu"]["median"],
        "speedup_2_dilated_by_cpu": timings["dilated"]["both_by_cpu"]["median"],
        "memory_share_2_nets": {name: timings[name]["memory_share"] for name in NETS},
        "speedup_2_nets": {name: timings[name]["both"]["median"] for name in NETS},
        "speedup_2_nets_by_cpu": {name: timings[name]["both_by_cpu"]["median"] for name in NETS},
        "worst_layer": worst.text,
        "kinds": dict(Counter(layer.kind for layer, _ in drawn)),
        "dtensor": peer,
        "timings": timings,
    }
