"""Playing with what a run has learned: evaluation games, a video, a strip of pictures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from murmurate.errors import MissingExtra, Refusal
from murmurate.evaluation.games import record_game
from murmurate.recipes import recipe
from murmurate.spec import derive_seed
from murmurate.training import checkpoint
from murmurate.training.restore import load_agent
from murmurate.training.run import Run
from murmurate.training.run_folder import read_run
from murmurate.training.summary import play
from murmurate.worlds.interface import ExampleWorld

Frames = npt.NDArray[np.uint8]  # [n, H, W, 3]
_STRIP = 8


def evaluate_folder(
    folder: Path, *, episodes: int = 10, which: str = "last", video: bool = False, seed: int | None = None
) -> dict[str, Any]:
    """Play whole games with a run's consensus parameters (GALA's protocol: argmax, up to 30 no-ops).

    which: ``last`` or ``best``. Raises Refusal if there is no such checkpoint or run.
    """
    if episodes < 1:
        raise Refusal(f"episodes is {episodes}; play at least one. Use --episodes 10.")
    run = read_run(folder, recipe)
    where = folder / "checkpoints" / which
    if which == "last":
        where = checkpoint.newest(folder / "checkpoints")
    elif (problem := checkpoint.damage(where)) is not None:
        raise Refusal(f"{problem} Use the last checkpoint instead: leave out --best.")
    if video and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise MissingExtra("imageio-ffmpeg", "video", "A video")
    result = play(run, where, episodes, seed)
    film = write_video(run, where, folder / "videos" / "episode.mp4", seed) if video else None
    return {
        "recipe": run.recipe,
        "checkpoint": where.name,
        "episodes": len(result.returns),
        "eval_return_mean": result.mean,
        "eval_return_stderr": None if len(result.returns) == 1 else result.stderr,
        "returns": list(result.returns),
        "video": None if film is None else str(film),
    }


def write_video(run: Run, where: Path, target: Path, seed: int | None = None) -> Path:
    """One greedy game as an mp4 (H.264), and ``frames.png`` beside it."""
    import imageio_ffmpeg

    frames = film(run, where, seed)
    target.parent.mkdir(exist_ok=True)
    height, width = frames.shape[1] // 2 * 2, frames.shape[2] // 2 * 2  # the codec wants even sizes
    fps = 15 if run.world.name not in ("cartpole",) else 50
    writer = imageio_ffmpeg.write_frames(
        str(target), (width, height), fps=fps, macro_block_size=1, output_params=["-loglevel", "error"]
    )
    writer.send(None)
    for frame in frames:
        writer.send(np.ascontiguousarray(frame[:height, :width]))
    writer.close()
    write_strip(frames, target.parent / "frames.png")
    return target


def film(run: Run, where: Path, seed: int | None = None) -> Frames:
    """Frames [n, H, W, 3] of one greedy game on a seed training never saw."""
    if isinstance(run.world, ExampleWorld):
        raise Refusal(f"{run.recipe} has no pictures: it learns from {run.unit}.")
    agent = load_agent(run, where)
    chosen = derive_seed(run.seed, "film") if seed is None else seed
    torch.set_num_threads(run.placement.threads)
    frames, _ = record_game(run.world, agent, chosen)
    return frames


def write_strip(frames: Frames, target: Path) -> None:
    """Eight frames, evenly spaced over the game, side by side."""
    import matplotlib.image  # slow to import, and most commands draw nothing

    target.parent.mkdir(exist_ok=True)
    picks = np.linspace(0, len(frames) - 1, _STRIP).astype(int)
    matplotlib.image.imsave(target, np.concatenate([frames[i] for i in picks], axis=1))
