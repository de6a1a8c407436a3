"""What is checked of a run before anything is changed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from pathlib import Path
from typing import cast

import numpy as np
import torch

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Capability, Fabric
from murmurate.fabric.simulated.fabric import Crashed, SimulatedFabric
from murmurate.nets.action_mask import PART, action_mask
from murmurate.nets.actor_critic import GaussianHead
from murmurate.nets.torso import AUTO, SMALLEST_SIDE
from murmurate.replicator.learner import Context, Learner, LearnerConfig
from murmurate.replicator.replicator import Replicator, check_capabilities
from murmurate.spec import EnvSpec, World
from murmurate.training.ends import warn_of_late_policy, warn_of_many_passes
from murmurate.training.launcher import Launcher
from murmurate.training.members import group_opener
from murmurate.training.memory import bytes_of, exceeds_memory, planned_bytes, refuse_too_small, too_large
from murmurate.training.restore import initial_values, refuse_unknown_names
from murmurate.training.run import Run
from murmurate.worlds.interface import SimulatorWorld, running_statistics

# half of the distance between the bounds of an action, in standard deviations of a policy's first draws
_LEAST_SPAN, _GREATEST_SPAN = 0.25, 10.0


def prepared(run: Run, launcher: Launcher) -> Run:
    """``run`` with its strategy adapted to its learner, checked. Raises Refusal (see ``preflight`` and
    ``try_once``)."""
    # workers may have another working directory
    initial = None if run.initial is None else str(Path(run.initial).resolve())
    run = dataclasses.replace(run, strategy=run.learner.adapted(run.strategy), initial=initial)
    learner = preflight(run, launcher)
    _warn_of_bounds(run.world.spec(), learner)
    _warn_of_statistics(run, try_once(run.world))
    _warn_of_double_buffer(run)
    warn_of_many_passes(run)
    warn_of_late_policy(run)
    return run


def resolved(run: Run) -> Run:
    """``run`` with machine-dependent defaults (``auto``) replaced by their values."""
    learner = run.learner.resolved(run.world.spec(), run.placement.device(0))
    _warn_of_flattened_images(run, learner)
    return dataclasses.replace(run, learner=learner)


def _warn_of_flattened_images(run: Run, learner: LearnerConfig) -> None:
    """Warn if ``auto`` chose an MLP for observations, or parts of them, that have the shape of images."""
    if getattr(run.learner, "torso", None) != AUTO or getattr(run.learner, "network", ""):
        return
    spec = run.world.spec()
    read = _parts_read_as_numbers(run.world)
    if getattr(learner, "torso", None) == "mlp":
        read.append(("an observation", spec.observation_shape, spec.observation_dtype == torch.uint8))
    for what, shape, is_uint8 in read:
        is_matrix = len(shape) == 2 and not is_uint8
        if is_matrix or sum(side >= SMALLEST_SIDE for side in shape) < 2:
            continue
        warnings.warn(
            f"{what} of {spec.name} has the shape {list(shape)}, and an MLP reads it as one vector. The "
            "images that a convolutional net reads are uint8, [C, H, W] or with few channels [H, W, C], and "
            f"have at least {SMALLEST_SIDE} x {SMALLEST_SIDE} pixels: convert it in a wrapper, or choose "
            "another --agent.torso (FILE.py:NAME for your own).",
            stacklevel=2,
        )
        return


def _parts_read_as_numbers(world: World) -> list[tuple[str, tuple[int, ...], bool]]:
    """(what it is, its shape, whether its dtype is uint8) of each part of a flattened observation that is no
    image, though large enough for one."""
    names = [
        name
        for name, start, stop, image in world.spec().parts
        if not image and stop - start >= SMALLEST_SIDE**2 and name.partition(".")[0] != PART
    ]
    # only where it must, as this makes an environment
    formats = cast(SimulatorWorld, world).formats() if names else None
    spaces = {} if formats is None else formats.parts
    return [
        (f"the part '{name}' of an observation", tuple(space.shape or ()), space.dtype == np.uint8)
        for name, space in spaces.items()
        if name in names
    ]


def _warn_of_double_buffer(run: Run) -> None:
    """Warn if a double buffer saves no time."""
    if not getattr(run.source, "double_buffer", False):
        return
    if not cast(SimulatorWorld, run.world).steps_in_background:
        warnings.warn(
            f"--double-buffer true (double_buffer=True in Python) saves no time: the learner waits while the "
            f"simulators of {run.world.name} step. Leave it out. (Where --world.served true moves them into "
            "another process it saves time, but each step costs a message more.)",
            stacklevel=2,
        )


def _warn_of_bounds(spec: EnvSpec, learner: Learner) -> None:
    """Warn if few of the first actions of a policy that ignores the bounds of actions would be between them,
    or if they would reach little of what is there."""
    modules = [module for replica in learner.replicas.values() for module in replica.module.modules()]
    if not any(isinstance(module, GaussianHead) for module in modules):
        return
    for number, (low, high) in enumerate(zip(spec.action_low, spec.action_high, strict=True)):
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            continue
        is_narrow = (high - low) / 2 < _LEAST_SPAN or low > 1.0 or high < -1.0
        if is_narrow or (high - low) / 2 > _GREATEST_SPAN:
            consequence = "most of its draws are clipped" if is_narrow else "its draws reach little of that"
            warnings.warn(
                f"component {number} of an action of {spec.name} is from {low:g} to {high:g}, and the policy "
                f"begins with a mean of about 0 and a standard deviation of 1: {consequence}. "
                "--world.rescale-actions true (or a wrapper) scales actions from -1 to 1 to the bounds.",
                stacklevel=2,
            )
            return


def _warn_of_statistics(run: Run, wrappers: tuple[str, ...]) -> None:
    """Warn if the environment normalises by ``running_statistics``, which no evaluation has."""

    def instead(field: str, constants: str) -> str:
        if field not in {each.name for each in dataclasses.fields(run.learner)}:
            return constants
        return f"use --agent.{field.replace('_', '-')} true (agent={{'{field}': True}} in Python)"

    if "NormalizeObservation" in wrappers:
        warnings.warn(
            f"the wrapper NormalizeObservation of {run.world.name} begins its statistics anew in each "
            "simulator and in each game of an evaluation, and exports lack them: evaluations are of wrongly "
            "scaled observations. Leave it out, and "
            f"{instead('normalize_observations', 'scale observations by constants')}.",
            stacklevel=2,
        )
    if "NormalizeReward" in wrappers and "NormalizeReward" in _statistics_in_evaluations(run.world):
        warnings.warn(
            f"the wrapper NormalizeReward of {run.world.name} also scales the rewards of evaluations, by "
            "statistics that begin anew in each game, so that their returns cannot be compared. Leave it "
            f"out, and {instead('scale_rewards', 'scale rewards by a constant')}, or let the function that "
            "makes the environment have a parameter training, and wrap only if it is true.",
            stacklevel=2,
        )


def _statistics_in_evaluations(world: World) -> tuple[str, ...]:
    simulators = cast(SimulatorWorld, world).open(1, training=False)
    with contextlib.suppress(Exception):
        simulators.close()
    return running_statistics(simulators)


def preflight(run: Run, launcher: Launcher) -> Learner:
    """The run's learner, built once. Raises Refusal for every failure that can be foreseen, before anything
    is changed."""
    run.validate()
    launcher.check(run)
    offered = launcher.capabilities(run)
    description = f"the {launcher.name} launcher" + " across hosts" * (offered != launcher.offers)
    check_capabilities(run.strategy, offered, description, device_types(run))
    check_compression(run)
    planned = planned_bytes(run)
    if planned is not None:
        refuse_too_small(run, planned)
    learner = build_once(run)
    if planned is None:  # perhaps as the learner cannot be built, of which ``build_once`` says why
        refuse_too_small(run, bytes_of(learner))
    return learner


def check_compression(run: Run) -> None:
    """Raise Refusal for a compression of what the strategy does not send."""
    if run.compression != "none" and not run.strategy.needs & {Capability.MAIL, Capability.REGISTER}:
        raise Refusal(
            f"compression is {run.compression}, and {run.strategy.name} sends nothing that is compressed: "
            "mail and register are, collectives and shared memory are not. Leave it out, or use "
            "--strategy gala."
        )


def try_once(world: World) -> tuple[str, ...]:
    """Reset and step a simulator of an environment that a user wrote, so that its faults show once, and
    before workers start. Returns its ``running_statistics``. Raises Refusal if it fails as often as would end
    a run."""
    if not world.is_tried():
        return ()
    spec, config = world.spec(), cast(SimulatorWorld, world)
    shape, dtype = ((), torch.int64) if spec.actions else (spec.action_shape, torch.float32)
    action = torch.zeros(1, *shape, dtype=dtype)
    mask = action_mask(spec)
    if not spec.actions:
        low, high = (torch.tensor(bound).view(shape) for bound in (spec.action_low, spec.action_high))
        action = action.clamp(low, high)
    simulators = config.open(1, training=True)
    try:
        step = simulators.reset(0)
        while True:  # a step that fails too often raises
            simulators.send(action if mask is None else mask.first_legal(step.observation))
            step = simulators.receive()
            if not step.restarts:
                return running_statistics(simulators)
    except RunFailed as failure:
        raise Refusal(str(failure)) from failure
    finally:
        with contextlib.suppress(Exception):
            simulators.close()


def device_types(run: Run) -> set[str]:
    """Those that the placement names. Raises Refusal for a device that does not exist."""
    device_types = set()
    for name in run.placement.devices:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise Refusal(f"'{name}' is no device. Use --placement.devices cpu, or cuda:0.") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise Refusal("the placement names a GPU and torch sees none. Use --placement.devices cpu.")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise Refusal(
                f"there is no {name}: torch sees {torch.cuda.device_count()} GPU(s), from cuda:0 up."
            )
        device_types.add(device.type)
    return device_types


def build_once(run: Run) -> Learner:
    """Build the learner on a simulated fabric, so that errors of the learner or the strategy show before
    workers start. Raises Refusal."""
    spec, initial = run.world.spec(), initial_values(run)
    if any(parts > pixels for parts, pixels in zip(run.grid, spec.observation_shape[1:], strict=False)):
        sizes = " x ".join(map(str, spec.observation_shape[1:]))
        raise Refusal(
            f"--parts {' '.join(map(str, run.parts))} divides images of {sizes} pixels into more parts than "
            "they have rows or columns. Use fewer, such as --parts 2."
        )

    def build(fabric: Fabric) -> Learner:
        replicator = Replicator(run.strategy, fabric, initial=initial, initial_except=run.initial_except)
        open_group = group_opener(run, fabric, range(fabric.size))
        context = Context(spec, replicator.replicate, run.seed, open_group=open_group)
        learner: Learner = run.learner.build(context)
        return learner

    size = 1 + run.strategy.centre
    try:
        built = SimulatedFabric(size, seed=0, keep_log=False).run([build] * size)[0]
    except (ValueError, RuntimeError, MemoryError, OverflowError) as error:
        if exceeds_memory(error):
            raise too_large(run, error) from error
        if not isinstance(error, ValueError):
            raise
        raise Refusal(f"{run.recipe} cannot be made like this: {str(error).rstrip('.')}.") from error
    if isinstance(built, Crashed):
        raise RuntimeError("the simulated fabric reported a crash that was not injected")
    refuse_unknown_names(run, built, initial)
    if run.grid != (1, 1) and (count := len(built.replicas)) > 1:
        raise Refusal(f"{run.learner.name} has {count} optimizers, and --parts needs one: leave out --parts.")
    return built
