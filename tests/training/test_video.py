"""Files of the frames of a game."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from murmurate.errors import Refusal, RunFailed
from murmurate.evaluation.games import Games
from murmurate.evaluation.interface import EvalContext
from murmurate.recipes import recipe
from murmurate.training.evaluate import film
from murmurate.training.video import FrameStrip, Mp4


def frame(number: int) -> np.ndarray:
    return np.full((4, 2, 3), number, np.uint8)


def test_a_strip_of_a_long_game_keeps_few_frames_that_are_evenly_spaced(tmp_path: Path) -> None:
    strip = FrameStrip()
    for number in (9, 9, None):  # of an episode that was lost
        strip.add(None if number is None else frame(number))
    drawn = frame(0)  # in which an environment draws every frame
    for number in range(251):
        drawn[:] = number
        strip.add(drawn)
        assert len(strip._kept) <= 64
    strip.write(tmp_path / "new" / "frames.png")
    picture = matplotlib.image.imread(tmp_path / "new" / "frames.png")
    shown = np.rint(255 * picture[0, ::2, 0]).astype(int)
    np.testing.assert_allclose(shown, np.linspace(0, 250, 8), atol=8)
    assert (shown[0], shown[-1]) == (0, 250)


def test_a_video_is_of_the_frames_that_count(tmp_path: Path) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    target = tmp_path / "game.mp4"
    with Mp4(target, target, 5) as video:
        for number in (1, 2, None, 3, 4, 5):
            video.add(None if number is None else np.full((33, 65, 3), number, np.uint8))
        video.finish()
    assert ffmpeg.count_frames_and_secs(str(target)) == (3, pytest.approx(3 / 5))


@dataclass(frozen=True)
class Drawn(Games):
    """Games whose pictures have these shapes; None: those before do not count."""

    shapes: tuple[tuple[int, ...] | None, ...] = ()

    def video(self, learner: object, context: EvalContext) -> Iterator[np.ndarray | None]:
        return iter([None if shape is None else np.zeros(shape, np.uint8) for shape in self.shapes])


@pytest.mark.parametrize(
    "shapes", [((4, 6, 3), (5, 6, 3)), ((4, 6),), ((4, 6, 4),), ((4, 6, 3), None, (5, 6, 3), (4, 6, 3))]
)
def test_pictures_that_make_no_film_are_refused(shapes: tuple[tuple[int, ...] | None, ...]) -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), evaluation=Drawn(shapes=shapes))
    with pytest.raises(Refusal, match=r"cartpole draws a picture of shape \[.*leave out --video"):
        list(film(run, Path(), None) or ())


def test_a_game_that_begins_anew_may_be_of_another_size() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), evaluation=Drawn(shapes=((4, 6, 3), None, (5, 6, 3))))
    assert len(list(film(run, Path(), None) or ())) == 3


def test_an_encoder_that_ends_early_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    encoder = tmp_path / "encoder"
    encoder.write_text("#!/bin/sh\necho 'unknown codec' >&2\nexit 3\n")
    encoder.chmod(0o755)
    monkeypatch.setattr(ffmpeg, "get_ffmpeg_exe", lambda: str(encoder))
    target, written = tmp_path / "game.mp4", []

    def film() -> None:
        with Mp4(target, target, 5) as video:
            for number in range(1_000):  # far more than a pipe holds
                video.add(np.zeros((200, 200, 3), np.uint8))
                written.append(number)

    with pytest.raises(RunFailed, match=r"game\.mp4 cannot be written: unknown codec\. "):
        film()
    assert len(written) < 1_000
