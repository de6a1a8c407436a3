"""Files of the frames of a game, which are written one by one: a film does not fit into memory."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np

from murmurate.errors import RunFailed
from murmurate.worlds.interface import Picture

_SHOWN = 8
_MOST_KEPT = 64  # frames from which those of a strip are chosen at the end


class Mp4:
    """Used in a ``with`` around ``add`` and ``finish``: writes a video (H.264) to ``path``. target: its name
    for messages."""

    def __init__(self, path: Path, target: Path, frames_per_second: float) -> None:
        self._path, self._target, self._rate = path, target, frames_per_second
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed by __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._errors.close()

    def add(self, frame: Picture | None) -> None:
        """Write a frame; with None the video begins anew. Raises RunFailed if it cannot be written."""
        if frame is None:
            self._end()
            return
        height, width = frame.shape[0] // 2 * 2, frame.shape[1] // 2 * 2  # the codec wants even sizes
        if self._process is None:
            self._process = self._started(height, width)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(np.ascontiguousarray(frame[:height, :width]).reshape(-1).data)
        except BrokenPipeError:
            self.finish()
            raise

    def finish(self) -> None:
        """Complete the file. Raises RunFailed if it cannot be written."""
        process = self._process
        if process is None:
            raise RunFailed(f"{self._target} cannot be written: the game has no pictures. Leave out --video.")
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if code := process.wait():
            self._errors.seek(0)
            cause = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            cause = cause or f"ffmpeg ended with exit code {code}"
            raise RunFailed(f"{self._target} cannot be written: {cause}. Make room, or leave out --video.")

    def _started(self, height: int, width: int) -> subprocess.Popen[bytes]:
        import imageio_ffmpeg

        size = f"{width}x{height}"
        raw = ["-f", "rawvideo", "-s", size, "-pix_fmt", "rgb24", "-r", str(self._rate), "-i", "-"]
        coded = ["-vcodec", "libx264", "-pix_fmt", "yuv420p", "-crf", "25", "-f", "mp4"]
        # not by imageio_ffmpeg.write_frames, which does not tell whether ffmpeg could write the file
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *raw, *coded, str(self._path)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=self._errors)

    def _end(self) -> None:
        """Kill the encoder, if it still runs."""
        if (process := self._process) is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate()
            self._process = None


class FrameStrip:
    """Eight frames side by side, evenly spaced over a game whose length is known at its end only."""

    def __init__(self) -> None:
        self._kept: list[Picture] = []
        self._every, self._added = 1, 0  # every how many frames one is kept
        self._last: Picture | None = None

    def add(self, frame: Picture | None) -> None:
        """None: the frames before do not count."""
        if frame is None:
            self._kept, self._every, self._added, self._last = [], 1, 0, None
            return
        if self._added % self._every == 0:
            self._kept.append(frame.copy())  # some environments draw all frames in one array
            if len(self._kept) > _MOST_KEPT:
                self._kept, self._every = self._kept[::2], 2 * self._every
        self._last, self._added = frame, self._added + 1

    def write(self, target: Path) -> None:
        """Write the picture; nothing without frames."""
        import matplotlib.image  # slow to import, and most commands draw nothing

        if self._last is None:
            return
        is_kept = (self._added - 1) % self._every == 0
        frames = self._kept if is_kept else [*self._kept, self._last]
        target.parent.mkdir(exist_ok=True)
        indices = np.linspace(0, len(frames) - 1, _SHOWN).astype(int)
        matplotlib.image.imsave(target, np.concatenate([frames[i] for i in indices], axis=1))
