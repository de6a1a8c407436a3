"""The evaluation of a run's checkpoints: at its end, and by ``murmurate eval``."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from murmurate.errors import MissingExtra, Refusal, RunFailed
from murmurate.evaluation.interface import EvalContext
from murmurate.record.stored import replacing
from murmurate.spec import derive_seed
from murmurate.training import checkpoint
from murmurate.training.data_record import check_data, read_fingerprint, refuse_missing
from murmurate.training.ends import is_of_examples
from murmurate.training.restore import load_agent, run_folder
from murmurate.training.run import Run
from murmurate.training.run_folder import locked
from murmurate.training.threads import all_threads

Frames = npt.NDArray[np.uint8]  # [n, H, W, 3]
_STRIP_FRAMES = 8


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
) -> dict[str, Any]:
    """The figures of the run's evaluation of one checkpoint.

    count: number of games, images or the like, in place of the number in the run's config. sample: draw
    actions from the policy. best: folder of the best checkpoint, which is then evaluated, too. learner: what
    was loaded of the checkpoint before; None: it is loaded. alone: whether nothing else of the run computes
    (see ``_place``); None: whether no process trains in the run folder. Raises Refusal if the data set is
    gone or has changed, or if actions shall be sampled in a run without actions.
    """
    if sample and not run.evaluation.plays:
        raise Refusal(
            f"{run.recipe} takes no actions that could be drawn. Leave out --sample (sample=True in Python)."
        )
    folder = run_folder(checkpoint_folder)
    device, threads = _place(run, _is_idle(folder) if alone is None else alone)
    fingerprint = read_fingerprint(folder)
    if fingerprint is not None:
        refuse_missing(run.world)
        check_data(folder, run.world)
    seed = derive_seed(run.seed, "evaluation games") if seed is None else seed

    def load_best() -> Any:
        return None if best is None or checkpoint.damage(best) is not None else load_agent(run, best)

    context = EvalContext(run.world, folder, seed, fingerprint, count, sample, load_best)
    if learner is None:
        learner = load_agent(run, checkpoint_folder, device)
    torch.set_num_threads(threads)
    return run.evaluation.evaluate(learner, context)


def _place(run: Run, alone: bool) -> tuple[torch.device, int]:
    """(device, number of torch threads) of an evaluation. One of a data set that is ``alone`` has all cores,
    and the first replica's GPU, if it is on this host; another one has what a process of the run has on a
    CPU."""
    cpu = torch.device("cpu")
    if not alone or not is_of_examples(run):
        return cpu, run.placement.threads
    device = run.placement.device(0)
    is_here = device.type == "cuda" and torch.cuda.is_available()
    is_here = is_here and (device.index or 0) < torch.cuda.device_count()
    return device if is_here else cpu, max(all_threads(), run.placement.threads)


def _is_idle(folder: Path) -> bool:
    """Whether no process trains in a run folder."""
    try:
        with locked(folder):
            return True
    except Refusal:
        return False


def evaluate_folder(
    run: Run,
    folder: Path,
    *,
    count: int | None = None,
    which: str = "last",
    video: bool = False,
    seed: int | None = None,
    sample: bool = False,
) -> dict[str, Any]:
    """Evaluate a run's consensus parameters (games: GALA's protocol, argmax and up to 30 no-ops).

    which: ``last`` or ``best``. sample: draw actions from the policy, instead of the most probable ones.
    Raises Refusal if there is no such checkpoint, and as ``figures``.
    """
    learner, alone = None, _is_idle(folder)
    if which == "last":
        device, _ = _place(run, alone)
        checkpoint_folder, learner = checkpoint.load_newest(
            folder / "checkpoints", lambda path: load_agent(run, path, device)
        )
    else:
        checkpoint_folder = best_checkpoint(run, folder, "--best")
    if video and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise MissingExtra("imageio-ffmpeg", "video", "A video")
    result = figures(
        run, checkpoint_folder, count=count, seed=seed, sample=sample, learner=learner, alone=alone
    )
    result.pop("best_eval_return_mean", None)  # it compares two checkpoints
    film = write_video(run, checkpoint_folder, folder / "videos" / "episode.mp4", seed) if video else None
    return {
        "recipe": run.recipe,
        "checkpoint": checkpoint_folder.name,
        **result,
        "video": None if film is None else str(film),
    }


def best_checkpoint(run: Run, folder: Path, option: str) -> Path:
    """The best checkpoint of a run's folder. option: what asked for it, for the message of the Refusal if
    there is none that can be used."""
    path = checkpoint.best(folder / "checkpoints")
    problem = checkpoint.damage(path)
    if problem is None:
        return path
    if not run.evaluation.plays and not path.exists():
        problem = (
            f"{run.recipe} keeps no best checkpoint: it has no returns to choose one by, and the figures of "
            "test data must not choose it, as they would then be biased."
        )
    raise Refusal(f"{problem} Use the last checkpoint instead: leave out {option}.")


def write_video(run: Run, checkpoint_folder: Path, target: Path, seed: int | None = None) -> Path:
    """Write one greedy game as an mp4 (H.264), and ``frames.png`` beside it. Raises Refusal if the world
    cannot be drawn, RunFailed if the mp4 cannot be written."""
    import imageio_ffmpeg

    frames = film(run, checkpoint_folder, seed)
    if frames is None:
        cause = f"it learns from {run.unit}"
        if run.evaluation.plays:
            cause = f"its evaluation, {type(run.evaluation).__name__}, makes no video"
        raise Refusal(f"{run.recipe} has no pictures: {cause}. Leave --video out.")
    target.parent.mkdir(exist_ok=True)
    height, width = frames.shape[1] // 2 * 2, frames.shape[2] // 2 * 2  # the codec wants even sizes
    world: Any = run.world  # of simulators, as it has pictures
    size, rate = f"{width}x{height}", str(world.env_steps_per_second)
    raw = ["-f", "rawvideo", "-s", size, "-pix_fmt", "rgb24", "-r", rate, "-i", "-"]
    coded = ["-vcodec", "libx264", "-pix_fmt", "yuv420p", "-crf", "25", "-f", "mp4"]
    content = np.ascontiguousarray(frames[:, :height, :width]).reshape(-1).data
    with replacing(target) as fresh:
        # not by imageio_ffmpeg.write_frames, which does not tell whether ffmpeg could write the file
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *raw, *coded, str(fresh)]
        ended = subprocess.run(command, input=content, stderr=subprocess.PIPE)
        if ended.returncode:
            cause = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            cause = cause or f"ffmpeg ended with exit code {ended.returncode}"
            raise RunFailed(f"{target} cannot be written: {cause}. Make room, or leave out --video.")
    write_strip(frames, target.parent / "frames.png")
    return target


def film(run: Run, checkpoint_folder: Path, seed: int | None = None) -> Frames | None:
    """Frames [n, H, W, 3] of one greedy game on a seed not used in training; None if the world cannot be
    drawn."""
    torch.set_num_threads(run.placement.threads)
    seed = derive_seed(run.seed, "film") if seed is None else seed
    context = EvalContext(run.world, run_folder(checkpoint_folder), seed)
    frames: Frames | None = run.evaluation.video(load_agent(run, checkpoint_folder), context)
    return frames


def write_picture(run: Run, folder: Path) -> None:
    """Write a strip of pictures of one game for the report, if the world can be drawn on this host, and the
    folder can be written."""
    checkpoint_folder = folder / "checkpoints" / "last"
    if checkpoint.damage(checkpoint_folder, replays=False) is None:
        with contextlib.suppress(Refusal, RunFailed, OSError):
            if (frames := film(run, checkpoint_folder)) is not None:
                write_strip(frames, folder / "videos" / "frames.png")


def write_strip(frames: Frames, target: Path) -> None:
    """Write eight frames, evenly spaced over the game, side by side."""
    import matplotlib.image  # slow to import, and most commands draw nothing

    target.parent.mkdir(exist_ok=True)
    indices = np.linspace(0, len(frames) - 1, _STRIP_FRAMES).astype(int)
    matplotlib.image.imsave(target, np.concatenate([frames[i] for i in indices], axis=1))
