"""The evaluation of a run's checkpoints: at its end, and by ``murmurate eval``."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from murmurate.datasets.image_folder import other_images
from murmurate.errors import MissingExtra, Refusal, RunFailed
from murmurate.evaluation.interface import EvalContext
from murmurate.record.recorder import plain_json
from murmurate.record.stored import replacing
from murmurate.spec import derive_seed
from murmurate.training import checkpoint
from murmurate.training.data_record import check_data, read_fingerprint, refuse_missing
from murmurate.training.ends import is_of_examples
from murmurate.training.own_files import warn_of_changes
from murmurate.training.restore import load_agent, load_chosen, run_folder
from murmurate.training.run import Run
from murmurate.training.run_folder import locked
from murmurate.training.threads import all_threads
from murmurate.training.video import FrameStrip, Mp4
from murmurate.worlds.interface import Picture

_LEAST_FREE_BYTES = 2 * 2**30  # of a GPU on which a data set is evaluated


def figures(
    run: Run,
    checkpoint_folder: Path,
    *,
    count: int | None = None,
    seed: int | None = None,
    best: Path | None = None,
    sample: bool = False,
    learner: Any = None,
    alone: bool | None = None,
    of: Path | None = None,
    images: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """The figures of the run's evaluation of one checkpoint.

    count: number of games, images or the like, in place of the number in the run's config. sample: draw
    actions from the policy. best: folder of the best checkpoint, which is then evaluated, too. learner: what
    was loaded of the checkpoint before; None: it is loaded. alone: whether nothing else of the run computes
    (see ``_place``); None: whether no process trains in the run folder. of: the run folder, where the
    checkpoint is a copy outside of it. images: a folder of images in place of the run's test images (see
    ``other_images``), for which the run's data set is not needed. Raises Refusal if the data set is gone or
    has changed, if actions shall be sampled in a run without actions, and as ``OtherImages``.
    """
    if sample and not run.evaluation.plays:
        raise Refusal(
            f"{run.recipe} takes no actions that could be drawn. Leave out --sample (sample=True in Python)."
        )
    folder = run_folder(checkpoint_folder) if of is None else of
    device, threads = _place(run, _is_idle(folder) if alone is None else alone)
    fingerprint = read_fingerprint(folder)
    world = run.world if images is None else other_images(run.world, images, fingerprint)
    if images is None and fingerprint is not None:
        refuse_missing(run.world)
        check_data(folder, run.world)
    seed = _seed_of_games(run) if seed is None else seed

    def load_best() -> Any:
        return None if best is None or checkpoint.damage(best) is not None else load_agent(run, best)

    context = EvalContext(world, folder, seed, fingerprint, count, sample, load_best)
    if learner is None:
        learner = load_agent(run, checkpoint_folder, folder, device)
    torch.set_num_threads(threads)
    return run.evaluation.evaluate(learner, context)


def without_nan(results: dict[str, Any]) -> dict[str, Any]:
    """``results`` for JSON, which has no arrays, no NaN and no infinity: the last two become None."""
    return {name: plain_json(value)[0] for name, value in results.items()}


def _place(run: Run, alone: bool) -> tuple[torch.device, int]:
    """(device, number of torch threads) of an evaluation. One of a data set that is ``alone`` has all cores,
    and the first replica's GPU, if it is on this host and has memory left; another one has what a process of
    the run has on a CPU."""
    cpu = torch.device("cpu")
    if not alone or not is_of_examples(run):
        return cpu, run.placement.threads
    device = run.placement.device(0)
    is_here = device.type == "cuda" and torch.cuda.is_available()
    is_here = is_here and (device.index or 0) < torch.cuda.device_count()
    is_here = is_here and torch.cuda.mem_get_info(device)[0] >= _LEAST_FREE_BYTES  # others may use it, too
    return device if is_here else cpu, max(all_threads(), run.placement.threads)


def _is_idle(folder: Path) -> bool:
    """Whether no process trains in a run folder."""
    try:
        with locked(folder):
            return True
    except Refusal:
        return False


def _seed_of_games(run: Run) -> int:
    """A seed that is not used in training."""
    return derive_seed(run.seed, "evaluation games")


def evaluate_folder(
    run: Run,
    folder: Path,
    *,
    count: int | None = None,
    which: str = "last",
    video: bool = False,
    seed: int | None = None,
    sample: bool = False,
    path: Path | None = None,
    images: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a run's consensus parameters (games: GALA's protocol, argmax and up to 30 no-ops).

    which: ``last`` or ``best``. path: of another checkpoint, in place of the last. sample: draw actions from
    the policy, instead of the most probable ones. images: see ``figures``.
    Raises Refusal if there is no such checkpoint, and as ``figures``.
    """
    warn_of_changes(folder, run)
    alone = _is_idle(folder)
    device, _ = _place(run, alone)
    checkpoint_folder, learner = load_chosen(run, folder, take_best=which == "best", path=path, device=device)
    if video and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise MissingExtra("imageio-ffmpeg", "video", "A video")
    target = folder / "videos" / "episode.mp4"
    if video:  # first: what is wrong with the world or the folder is raised before many games are played
        write_video(run, folder.absolute(), learner, target, seed, sample)
    result = figures(
        run,
        checkpoint_folder,
        count=count,
        seed=seed,
        sample=sample,
        learner=learner,
        alone=alone,
        of=folder.absolute(),
        images=images,
    )
    result.pop("best_eval_return_mean", None)  # it compares two checkpoints
    return {
        "recipe": run.recipe,
        "checkpoint": checkpoint_folder.name,
        **result,
        "video": str(target) if video else None,
    }


def write_video(run: Run, folder: Path, learner: Any, target: Path, seed: int | None, sample: bool) -> None:
    """Write one game as an mp4 (H.264) to ``target``, and ``frames.png`` beside it; the others: see ``film``.
    Raises Refusal if the world cannot be drawn, RunFailed if the mp4 cannot be written."""
    frames = _frames_of(run, folder, learner, seed, sample)
    first = next(frames, None)  # raises what is wrong with the world before anything is written
    target.parent.mkdir(exist_ok=True)
    world: Any = run.world  # of simulators, as it has pictures
    strip = FrameStrip()
    with replacing(target) as fresh, Mp4(fresh, target, world.env_steps_per_second) as mp4:
        for frame in itertools.chain([first], frames):
            mp4.add(frame)
            strip.add(frame)
        mp4.finish()
    strip.write(target.parent / "frames.png")


def _frames_of(
    run: Run, folder: Path, learner: Any, seed: int | None, sample: bool
) -> Iterator[Picture | None]:
    """See ``film``. Raises Refusal if the world cannot be drawn."""
    frames = film(run, folder, learner, seed, sample)
    if frames is None:
        cause = f"it learns from {run.unit}"
        if run.evaluation.plays:
            cause = f"its evaluation, {type(run.evaluation).__name__}, makes no video"
        raise Refusal(f"{run.recipe} has no pictures: {cause}. Leave --video out.")
    return frames


def film(
    run: Run, folder: Path, learner: Any, seed: int | None = None, sample: bool = False
) -> Iterator[Picture | None] | None:
    """The frames (see ``Evaluation.video``) of the first game that ``figures`` evaluates with this seed and
    ``sample``; None if the world cannot be drawn. folder: of the run. They raise Refusal if a picture is not
    [H, W, 3], or not of the size of the others."""
    torch.set_num_threads(run.placement.threads)
    seed = _seed_of_games(run) if seed is None else seed
    frames = run.evaluation.video(learner, EvalContext(run.world, folder, seed, sample=sample))
    return None if frames is None else _of_one_size(frames, run.world.name)


def _of_one_size(frames: Iterable[Picture | None], world: str) -> Iterator[Picture | None]:
    size: tuple[int, ...] | None = None
    for frame in frames:
        size = None if frame is None else size or (*frame.shape[:2], 3)
        if frame is not None and frame.shape != size:
            raise Refusal(
                f"{world} draws a picture of shape {list(frame.shape)}, and those of a film are [H, W, 3], "
                "all of one size. Correct its render(), or leave out --video."
            )
        yield frame


def write_picture(run: Run, folder: Path) -> None:
    """Write a strip of pictures of one game for the report, if the world can be drawn on this host, and the
    folder can be written."""
    checkpoint_folder = folder / "checkpoints" / "last"
    if checkpoint.damage(checkpoint_folder, replays=False) is None:
        with contextlib.suppress(Refusal, RunFailed, OSError):
            if (frames := film(run, folder, load_agent(run, checkpoint_folder))) is not None:
                strip = FrameStrip()
                for frame in frames:
                    strip.add(frame)
                strip.write(folder / "videos" / "frames.png")
