"""The bench of image loading on a few small files: every loader runs, and gives what it should."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from murmurate.bench import _plain_images, image_loading
from murmurate.bench._image_loaders import (
    EndlessOrder,
    SameFunctions,
    TorchLoader,
    WithPillow,
    files_of,
    make_folder,
)
from murmurate.bench.image_loading import LoadingPlan
from murmurate.datasets.image_augmentation import DRAWS, Augmentation
from murmurate.launch import role

pytest.importorskip("cv2")
pytest.importorskip("PIL")
TINY = LoadingPlan(images=12, height=40, width=50, size=16, batch=3, workers=1, rounds=2, batches=2)


def test_all_loaders_are_measured():
    result = image_loading.measure(TINY, lambda line: None)
    json.dumps(result)
    assert len(result["by_loader"]) == 3
    for rates in result["by_loader"].values():
        assert rates["images_per_cpu_second"]["repetitions"] == 2
        assert rates["images_per_second"]["least"] > 0
    assert result["ratio_pillow"] > 0
    assert result["bytes_per_image"] > 100


def test_generated_files_are_always_the_same(tmp_path):
    for name in ("one", "other"):
        make_folder(tmp_path / name, 4, 40, 50, 90, 2)
    one, other = (files_of(tmp_path / name, 16).select(range(4)) for name in ("one", "other"))
    np.testing.assert_array_equal(one.pixels, other.pixels)
    assert one.pixels.std() > 10
    assert one.labels.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("data", [SameFunctions, WithPillow])
def test_no_side_transposes_images(data: type[SameFunctions | WithPillow], tmp_path: Path) -> None:
    make_folder(tmp_path, 3, 40, 50, 90, 2)
    loader = TorchLoader(data(tmp_path, 16), 3, workers=1, prefetch=1)
    try:
        images, labels = loader.next()
    finally:
        loader.close()
    assert (images.shape, labels.shape) == ((3, 3, 16, 16), (3,))
    assert images.is_contiguous(memory_format=torch.channels_last)
    x = _plain_images._normalised(images.permute(0, 2, 3, 1))
    assert x.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(x[:, 2], (images[:, 2] / 255 - 0.406) / 0.225)


def test_an_update_of_the_plain_loops_is_one_pass_over_memory_as_in_the_classifier() -> None:
    assert _plain_images.sgd(torch.nn.Linear(2, 2)).defaults["fused"]


def test_torchs_processes_keep_the_memory_of_decoded_images_as_ours_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "images", 3, 40, 50, 90, 2)
    monkeypatch.setattr(role, "prepare_process", lambda threads: (tmp_path / str(os.getpid())).touch())
    loader = TorchLoader(SameFunctions(tmp_path / "images", 16), 3, workers=2, prefetch=2)
    try:
        loader.next()
        loader.next()  # of the other process
        prepared = [(tmp_path / str(process.pid)).exists() for process in loader.processes()]
    finally:
        loader.close()
    assert prepared == [True, True]


def test_both_data_sets_draw_an_images_random_numbers_as_torchs_users_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path, 2, 40, 50, 90, 2)
    drawn: list[np.ndarray] = []
    crop_of = Augmentation.crop_of

    def noted(self, height, width, into, shortest, draws):
        drawn.append(draws)
        return crop_of(self, height, width, into, shortest, draws)

    monkeypatch.setattr(Augmentation, "crop_of", noted)
    for data in (SameFunctions, WithPillow):
        torch.manual_seed(0)
        data(tmp_path, 16)[0]
    torch.manual_seed(0)
    expected = torch.rand(DRAWS, dtype=torch.float64).numpy()
    for draws in drawn:
        np.testing.assert_array_equal(draws, expected)
    assert len(drawn) == 2


def test_torchs_loader_goes_through_all_images_again_and_again_without_a_pause(tmp_path: Path) -> None:
    order = list(itertools.islice(EndlessOrder(5), 15))
    passes = [order[0:5], order[5:10], order[10:15]]
    assert [sorted(numbers) for numbers in passes] == [list(range(5))] * 3
    assert len({tuple(numbers) for numbers in passes}) == 3
    make_folder(tmp_path, 5, 40, 50, 90, 5)
    loader = TorchLoader(SameFunctions(tmp_path, 16), 3, workers=1, prefetch=1)
    try:
        labels = torch.cat([loader.next()[1] for _ in range(5)]).tolist()
    finally:
        loader.close()
    assert labels == order, "a batch that would end a pass goes on with the next one"
