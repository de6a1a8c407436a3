"""Pilots: short runs of a recipe's own training loop, with one replica, in which each primitive is timed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from murmurate.errors import Refusal
from murmurate.fabric.interface import Fabric
from murmurate.fabric.processes.fabric import ProcessFabric
from murmurate.fabric.processes.run_state import RunState
from murmurate.fabric.processes.shared_memory import SharedMemoryFile
from murmurate.launch import launcher
from murmurate.launch.role import prepare_process
from murmurate.launch.together import run_together
from murmurate.mapping.primitives import OF_MODEL, PER_STEP, PRIMITIVES, shape_of
from murmurate.mapping.timers import Clock, ModelCalls, TimedWorld, attach
from murmurate.strategies.solo import Solo
from murmurate.training.loop import TrainingLoop
from murmurate.training.preflight import resolved
from murmurate.training.run import Run
from murmurate.training.worker_context import WorkerContext

_WINDOWS = 4
_ENOUGH_ITERATIONS, _LEAST_ITERATIONS = 4 * _WINDOWS, 3
_LONGEST_SECONDS = 40.0
_WARM_UP_SHARE = 0.3
_FEW_TRANSITIONS = 2_000  # transitions in the replay when learning begins
_IMAGES_ON_DEVICE = 50_000
_STEPS_OF_A_TURN = 8  # of each simulator, where collecting and learning alternate
_BATCHES_OF_A_FIT = 16  # between two fits of a model, which are timed by themselves


@dataclasses.dataclass(frozen=True)
class Pilot:
    """What a pilot measured.

    simulators, rows: numbers of simulators and rows of a batch. seconds: seconds of one call of each
    primitive, in each of several windows. iteration: seconds of an iteration in each window. deviation: the
    standard deviation of the seconds of single iterations. background: share of the primitive ``simulate``'s
    time in which the loop waited for the threads or processes that step the simulators. vectors,
    vectors_within: see ``RecipeCosts``. step_deviation: see ``_step_deviation``; None if it was not measured.
    """

    simulators: int
    rows: int
    seconds: dict[str, list[float]]
    iteration: list[float]
    deviation: float
    background: float = 0.0
    vectors: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    vectors_within: dict[str, list[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    step_deviation: float | None = None


def steady(run: Run) -> Run:
    """``run`` for an hour, without checkpoints, evaluations, loggers, restarts and compression. It learns
    almost from the start: few transitions in the replay are enough, and the policy acts from the first step
    (random actions would cost no forward pass)."""
    source: Any = run.source
    learner: Any = run.learner
    if hasattr(source, "random_env_steps"):
        source = dataclasses.replace(source, random_env_steps=0)
    if hasattr(source, "replay"):
        requires: Any = run.learner.requires
        starts = min(max(_FEW_TRANSITIONS, requires.batch), source.replay.capacity)
        if source.replay.fit_every and getattr(learner, "target_every", None) == 0:  # once a fit
            fit = round(source.replay.fit_every * source.replay.samples_per_insert / requires.batch)
            learner = dataclasses.replace(learner, target_every=fit)
        # a pilot's windows would lie between two collections of env steps
        replay = dataclasses.replace(source.replay, learning_starts=starts, saved=False, fit_every=0)
        source = dataclasses.replace(source, replay=replay)
    if hasattr(source, "minibatches"):
        source = _in_short_turns(source, run.learner.requires.steps)  # type: ignore[attr-defined]
    if hasattr(learner, "explore_updates"):
        learner = dataclasses.replace(learner, explore_updates=0)
    if hasattr(learner, "validate_every"):
        learner = dataclasses.replace(learner, validate_every=0)
    return dataclasses.replace(
        run,
        source=source,
        learner=learner,
        env_steps=None,
        updates=None,
        minutes=60.0,
        stop_at_return=None,
        probe_every_updates=0,
        checkpoint_every_env_steps=10**12,
        checkpoint_every_seconds=None,
        evaluate_every_env_steps=0,
        loggers=(),
        restarts=0,
        compression="none",
    )


def _in_short_turns(source: Any, sequence: int) -> Any:
    """``source``, which collects env steps and draws sequences of ``sequence`` steps in turn, with fewer of
    both in the same proportion."""
    least = min(source.steps, max(_STEPS_OF_A_TURN, 2 * sequence))
    minibatches = math.ceil(source.minibatches * least / source.steps)
    # The steps follow from the minibatches, as there are more of them: the number of minibatches may be as
    # small as one, and rounding it would change the proportion by up to a factor of two.
    steps = round(minibatches * source.steps / source.minibatches)
    return dataclasses.replace(source, collect_env_steps=steps * source.simulators, minibatches=minibatches)


def pilot_run(run: Run) -> Run:
    """``steady(run)`` with one replica, and without actor processes and double buffering.

    A model is fitted and rolled out often there, in a short time each: to few transitions, for few gradient
    steps, and for one step. Raises Refusal if the run's costs are not modelled, its replicas have parts, or
    its launcher has one process.
    """
    if launcher(run.launcher).one_process:
        raise Refusal(
            f"a plan is of replicas that compute at the same time, and those of the {run.launcher} launcher "
            "do not: leave out --launcher."
        )
    if math.prod(run.grid) > 1:
        raise Refusal("processes for the parts of a replica are not modelled: leave out --parts.")
    if shape_of(run) is None:
        raise Refusal(
            f"{run.recipe} learns from {run.learner.requires.kind}, whose costs are not modelled: its source "
            "tells no `batch_shape` for it. A plan is made for recipes that learn from rollouts, "
            "trajectories, sequences, examples, a replay of their own, or a model that tells how long its "
            "fits are (mbpo, memr)."
        )
    found = steady(run)
    learner: Any = found.learner
    source: Any = _with_few_images(in_one_process(found.source))
    if learner.requires.kind == "model":
        learner = learner.with_short_fits()
        source = source.with_short_rounds(_BATCHES_OF_A_FIT, _FEW_TRANSITIONS)
    return dataclasses.replace(found, learner=learner, source=source, strategy=Solo(), replicas=1)


def sizes(run: Run) -> list[Run]:
    """Pilots of ``run``: first with its own simulators and batch, then with fewer and more of each."""
    base = pilot_run(run)
    if base.learner.requires.kind == "examples":
        batch = base.learner.requires.batch  # type: ignore[attr-defined]
        return [_with_batch(base, size) for size in (batch, max(1, batch // 4), 2 * batch)]
    source: Any = base.source
    pilots = [base]
    requires: Any = base.learner.requires
    if hasattr(source, "simulators"):
        own = source.simulators // max(1, getattr(run.source, "actors", 0))
        least = getattr(requires, "simulators", 1)
        for simulators in dict.fromkeys((max(1, own // 4), own, 2 * source.simulators)):
            if simulators != source.simulators and simulators >= least:
                changed = dataclasses.replace(source, simulators=simulators)
                pilots.append(dataclasses.replace(base, source=changed))
    if requires.kind == "transitions":
        most = source.replay.capacity // source.replay.segments  # of more rows no batch could be drawn
        batches = {min(size, most) for size in (max(8, requires.batch // 4), 4 * requires.batch)}
        for batch in sorted(batches - {requires.batch}):
            # as many env steps for each batch as the recipe has
            ratio = source.replay.samples_per_insert * batch / requires.batch
            starts = min(max(source.replay.learning_starts, batch), source.replay.capacity)
            replay = dataclasses.replace(source.replay, samples_per_insert=ratio, learning_starts=starts)
            changed = dataclasses.replace(base, source=dataclasses.replace(source, replay=replay))
            pilots.append(_with_batch(changed, batch))
    if requires.kind == "sequences":
        pilots += [_with_batch(base, size) for size in (max(1, requires.batch // 4), 4 * requires.batch)]
    return pilots


def _with_batch(run: Run, batch: int) -> Run:
    learner: Any = run.learner
    return dataclasses.replace(run, learner=dataclasses.replace(learner, batch=batch))


def _with_few_images(source: Any) -> Any:
    """``source`` with a smaller replay if its images are on a device, whose memory each of several pilots
    takes at once."""
    replay: Any = getattr(source, "replay", None)
    if replay is None or replay.images == "host":
        return source
    capacity = min(replay.capacity, _IMAGES_ON_DEVICE)
    starts = min(replay.learning_starts, capacity)
    return dataclasses.replace(
        source, replay=dataclasses.replace(replay, capacity=capacity, learning_starts=starts)
    )


def in_one_process(source: Any) -> Any:
    """``source`` without actor processes and double buffering."""
    values = {"actors": 0, "workers": 0, "double_buffer": False}
    return dataclasses.replace(source, **{name: v for name, v in values.items() if hasattr(source, name)})


def measure(run: Run, seconds: float, busy: int = 1) -> Pilot:
    """Time the primitives of ``run``, as ``pilot_run`` returns it, for about ``seconds`` after a warm-up.

    busy: number of processes that each do so at once; the result is their mean. Raises Refusal if they make
    too few batches in ``_LONGEST_SECONDS``, and RunFailed if a process fails.
    """
    run = resolved(run)
    replay = getattr(run.source, "replay", None)
    disk = replay.folder if replay is not None else None  # each process keeps a replay of its own there
    if disk:
        Path(disk).mkdir(parents=True, exist_ok=True)
    # made here, as a Ctrl-C kills the processes that write to it
    with tempfile.TemporaryDirectory(prefix="murmurate-pilot-", dir=disk) as folder:
        timings = run_together(busy, _timed, run, seconds, folder)
    found = [timing.iterations for timing in timings]
    turn = _turn(run)  # the pilot's iterations are means of as many
    if min(map(len, found)) < _LEAST_ITERATIONS:
        remedy = "fewer --simulators, or shorter rollouts"
        if not hasattr(run.source, "simulators"):
            remedy = "a smaller --agent.batch"
        elif turn > 1:
            remedy = "fewer --minibatches, or a smaller --agent.batch"
        if hasattr(run.source, "rollouts"):
            remedy = "fewer --rollouts.starts, or a smaller --agent.model.hidden"
        raise Refusal(
            f"{run.recipe} made too few batches in {_LONGEST_SECONDS:g} s to measure them. Use {remedy}."
        )
    shape = shape_of(run)
    assert shape is not None
    count = min(_WINDOWS, *map(len, found))
    per_window = [_windows(iterations, shape.steps, count) for iterations in found]
    names = per_window[0][0]
    calls = {
        name: [float(np.mean([windows[0][name][w] for windows in per_window])) for w in range(count)]
        for name in names
    }
    of_model = timings[0].of_model
    calls |= {name: [s for each in timings for s in each.of_model[name].seconds] for name in of_model}
    total = [float(np.mean([windows[1][w] for windows in per_window])) for w in range(count)]
    deviation = math.sqrt(turn) * float(np.mean([windows[2] for windows in per_window]))
    waited, simulated = (
        sum(iteration[name] for iterations in found for iteration in iterations)
        for name in ("wait", "simulate")
    )
    background = waited / simulated if simulated else 0.0
    steps = [timing.step_deviation for timing in timings if timing.step_deviation is not None]
    vectors = timings[0].vectors
    within = {name: found.vectors for name, found in of_model.items()}
    return Pilot(
        shape.simulators,
        shape.rows,
        calls,
        total,
        deviation,
        background,
        vectors,
        within,
        float(np.mean(steps)) if steps else None,
    )


def _turn(run: Run) -> int:
    """Number of batches between two env steps, for those sources whose pilots alternate between many batches
    and env steps."""
    if run.learner.requires.kind == "model":
        return run.source.batches_at_once(run)
    return int(getattr(run.source, "minibatches", 1))


def _windows(
    iterations: Sequence[dict[str, float]], steps: float, count: int
) -> tuple[dict[str, list[float]], list[float], float]:
    """Seconds of a call of each primitive in each of ``count`` windows, seconds of an iteration in each
    window, and the standard deviation of an iteration's seconds."""
    parts = np.array_split(np.arange(len(iterations)), count)
    calls = {}
    for name in PRIMITIVES:
        values = np.array([iteration[name] for iteration in iterations])
        divisor = steps if name in PER_STEP else 1.0
        calls[name] = [float(values[part].mean() / divisor) for part in parts]
    totals = np.array([iteration["total"] for iteration in iterations])
    low, high = np.percentile(totals, [2, 98])  # outliers would dominate the deviation
    return calls, [float(totals[part].mean()) for part in parts], float(np.std(np.clip(totals, low, high)))


class _Timing(NamedTuple):
    """iterations: the seconds of each by primitive. vectors: see ``RecipeCosts``. of_model: the calls of each
    primitive ``OF_MODEL``. step_deviation: see ``Pilot``."""

    iterations: list[dict[str, float]]
    vectors: list[tuple[int, float]]
    of_model: dict[str, ModelCalls]
    step_deviation: float | None


def _timed(fabric: Fabric, run: Run, seconds: float, folder: str) -> _Timing:
    """Runs the loop in this process. folder: where the processes may write."""
    prepare_process(run.placement.threads)
    memory_file, run_state, clock = SharedMemoryFile.create(), RunState(1), Clock()
    run_state.open()
    iterations: list[dict[str, float]] = []
    world: Any = TimedWorld(run.world, clock)
    own_device = str(run.placement.device(fabric.rank))  # processes at once share GPUs as replicas do
    placement = dataclasses.replace(run.placement, devices=(own_device,))
    own_folder = Path(folder) / str(fabric.rank)
    (own_folder / "checkpoints").mkdir(parents=True)
    source = _with_replay_in(run.source, own_folder / "replay")
    timed = dataclasses.replace(run, world=world, placement=placement, source=source)
    began: list[float] = []
    turn = _turn(run)
    least = max(_ENOUGH_ITERATIONS, (1 + _WINDOWS) * turn)  # the first turn is warm-up

    def between_steps() -> None:
        if not iterations:
            return
        now = time.monotonic()
        if not began:
            began.append(now)
        spent = now - began[0]
        enough = spent > (1 + _WARM_UP_SHARE) * seconds and len(iterations) > least
        if enough or spent > _LONGEST_SECONDS:
            run_state.request_stop()

    alone = ProcessFabric(memory_file, run_state, 0)
    context = WorkerContext(0, alone, run_state, own_folder, time.monotonic(), between_steps=between_steps)
    loop = TrainingLoop(timed, context)
    attach(loop, clock, iterations)
    loop.run_to_end()
    memory_file.close()
    warm_up = min(len(iterations) // 2, max(1, int(_WARM_UP_SHARE / (1 + _WARM_UP_SHARE) * len(iterations))))
    first = math.ceil(warm_up / turn) * turn
    kept = _of_turns(iterations[first:], turn)
    # the batches of a turn are not alike: their steps are not compared
    step_deviation = _step_deviation(clock.steps[max(0, first - 1) : len(iterations)]) if turn == 1 else None
    of_model = {name: ModelCalls.of(name, clock.calls[name]) for name in OF_MODEL if clock.calls[name]}
    vectors = {}
    for name, replica in loop.learner.replicas.items():
        elsewhere = sum(call.updates[name] for calls in clock.calls.values() for call in calls)
        vectors[name] = len(replica), (replica.clock - elsewhere) / loop.batches
    return _Timing(kept, list(vectors.values()), of_model, step_deviation)


def _with_replay_in(source: Any, folder: Path) -> Any:
    """``source`` with its replay in files in ``folder``, if it keeps one in files."""
    replay: Any = getattr(source, "replay", None)
    if replay is None or not replay.folder:
        return source
    return dataclasses.replace(source, replay=dataclasses.replace(replay, folder=str(folder)))


def _step_deviation(steps: Sequence[Sequence[float]]) -> float | None:
    """The standard deviation of the seconds between a step of the strategy and the one before it, summed over
    the steps of a batch. None if too few batches have equally many.

    steps: when the steps of each batch began. The first batch only tells when its last step began.
    """
    if len(steps) <= _LEAST_ITERATIONS:
        return None
    usual = statistics.mode(map(len, steps))
    whole = [[*before[-1:], *batch] for before, batch in itertools.pairwise(steps) if len(batch) == usual]
    begins = [batch for batch in whole if len(batch) == 1 + usual]
    if usual == 0 or len(begins) < _LEAST_ITERATIONS:
        return None
    intervals = np.diff(begins, axis=1)
    low, high = np.percentile(intervals, [2, 98], axis=0)  # outliers would dominate the deviations
    return float(np.std(np.clip(intervals, low, high), axis=0).sum())


def _of_turns(iterations: list[dict[str, float]], turn: int) -> list[dict[str, float]]:
    """The mean seconds of iterations in each whole turn."""
    turns = [iterations[i : i + turn] for i in range(0, len(iterations) - turn + 1, turn)]
    return [{name: float(np.mean([each[name] for each in own])) for name in own[0]} for own in turns]
