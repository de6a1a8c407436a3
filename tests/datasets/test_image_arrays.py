"""Images and labels in ``.npz`` files: their parts, and what is wrong in them."""

from __future__ import annotations

import numpy as np
import pytest

from murmurate.datasets.image_arrays import ArraysWorld
from murmurate.errors import Refusal
from pictures import drawn


def arrays(**more):
    return {"train_images": drawn(20, 6, 5, 3), "train_labels": np.arange(20) % 4, **more}


def test_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", **arrays())
    world = ArraysWorld(str(tmp_path / "a.npz"), validation=3, test=0.1)
    parts = world.divided()
    assert [len(part) for part in parts] == [15, 3, 2]
    which = parts.test.indices
    np.testing.assert_array_equal(parts.test.select([0, 1]).pixels, drawn(20, 6, 5, 3)[which])
    assert (world.spec().observation_shape, world.spec().actions) == ((3, 6, 5), 4)
    grey = {"x_train": drawn(9, 4, 4), "y_train": np.arange(9)[:, None], "x_test": drawn(2, 4, 4)}
    np.savez(tmp_path / "b.npz", y_test=np.array([3, 4]), class_names=np.array(["a", "b"]), **grey)
    parts = ArraysWorld(str(tmp_path / "b.npz"), validation=1).divided()
    assert [len(part) for part in parts] == [8, 1, 2]
    assert parts.test.select([1]).images.shape == (1, 1, 4, 4)
    three = {"val_images": drawn(3, 6, 5, 3), "val_labels": np.zeros(3, int)}
    np.savez(
        tmp_path / "c.npz", **arrays(**three, test_images=drawn(2, 6, 5, 3), test_labels=np.ones(2, int))
    )
    assert [len(part) for part in ArraysWorld(str(tmp_path / "c.npz")).divided()] == [20, 3, 2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_images": drawn(20, 6, 5, 3).astype(float)}, "train_images is float64"),
        ({"train_images": drawn(20, 3, 6, 5)}, "should be of channels"),
        ({"train_labels": np.zeros(19, int)}, "one for each of the 20"),
        ({"train_labels": np.zeros(20)}, "should be whole numbers"),
        ({"train_labels": np.full(20, -1)}, "has the label -1"),
        ({"test_images": drawn(2, 5, 5, 3), "test_labels": np.zeros(2, int)}, "several sizes"),
        ({"train_labels": np.array([object()] * 20)}, r"of Python objects, .*labels.astype\(\"int64\"\)"),
        ({"train_labels": np.full(20, -1)}, "labels are integers from 0 up"),
        ({"train_labels": np.full(20, 10**6)}, r"label 1,000,000, and 999,999 is the greatest. .*np.unique"),
        ({"train_labels": np.zeros(19, int)}, "one label for each image"),
        ({"train_labels": np.zeros(20)}, r'Save train_labels.astype\("int64"\)'),
        ({"train_labels": np.array(["a", "b"] * 10)}, r"np.unique\(train_labels, return_inverse=True\)"),
        ({"train_labels": np.eye(20)}, r"one-hot vectors, save train_labels.argmax\(1\)"),
        ({"train_images": drawn(20, 6, 5, 3).astype(float)}, r"Save train_images.round\(\).astype"),
        (
            {"train_images": drawn(20, 6, 5, 3) / 255},
            r"\(255 \* train_images\).round\(\).astype\(\"uint8\"\)",
        ),
        ({"train_images": drawn(20, 6, 5, 3).astype(int)}, r'Save train_images.astype\("uint8"\)'),
        ({"train_images": drawn(20, 6, 5, 3) > 9}, r"Save 255 \* train_images.astype"),
        ({"train_images": drawn(20, 6, 5, 3) * 1.0 - 300}, "Scale its values, .* 0 to 255"),
        ({"train_images": np.full((20, 6, 5, 3), np.nan)}, "not finite"),
        ({"train_images": np.full((20, 6, 5, 3), "a")}, "numbers from 0 to 255"),
        ({"train_images": drawn(20, 90)}, "Reshape it"),
        ({"train_images": drawn(0, 6, 5, 3)}, "at least one image"),
        ({"train_images": drawn(20, 3, 6, 5)}, r"Transpose it: train_images.transpose\(0, 2, 3, 1\)"),
        ({"train_images": drawn(20, 4, 6, 5)}, r"train_images\[:, :3\].transpose"),
        ({"train_images": drawn(20, 6, 5, 4)}, r"Drop the fourth channel, .*train_images\[..., :3\]"),
        ({"train_images": drawn(20, 6, 5, 5)}, r"Keep three channels, .*train_images\[..., :3\]"),
        ({"train_images": drawn(20, 6, 5, 2)}, r"Keep one channel: train_images\[..., :1\]"),
        (
            {"test_images": drawn(2, 6, 5, 3), "test_labels": np.array([1, 9])},
            "test_labels: 1 of 2 images have labels that no training image has, such as 9",
        ),
        ({"test_images": drawn(2, 6, 5, 3)}, "holds test_images without test_labels. Add test_labels"),
        ({"val_labels": np.zeros(2, int)}, "holds val_labels without val_images"),
        ({"val_image": drawn(2, 6, 5, 3)}, "holds val_image. Rename it val_images, or leave it out"),
        (
            {"x_train": drawn(2, 6, 5, 3), "y_train": np.zeros(2, int)},
            "holds both train_images and x_train. Leave one of them out",
        ),
    ],
)
def test_arrays_that_are_wrong_are_refused(change, words, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays(**change))
    with pytest.raises(Refusal, match=words):
        ArraysWorld(str(tmp_path / "a.npz")).divided()


def test_other_files_than_arrays_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", pictures=drawn(3, 4, 4))
    spellings = "train_images and train_labels, x_train and y_train, or images and labels"
    with pytest.raises(Refusal, match=spellings):
        ArraysWorld(str(tmp_path / "a.npz")).divided()
    (tmp_path / "t.npz").write_text("text")
    for name, words in (
        ("a.npz", "holds pictures; it should"),
        ("none.npz", r"none\.npz cannot be read: No such file"),
        ("t.npz", r"t\.npz is no \.npz file of arrays"),
    ):
        with pytest.raises(Refusal, match=words):
            ArraysWorld(str(tmp_path / name)).divided()
    with pytest.raises(Refusal, match="say where"):
        ArraysWorld().divided()


@pytest.mark.parametrize(
    ("count", "test", "drawn_images"), [(9, 1, 1), (9, 0, 0), (9, 0.1, 1), (9, 0.05, None)]
)
def test_a_share_without_a_test_image_is_refused(count, test, drawn_images, tmp_path):
    np.savez(tmp_path / "a.npz", images=drawn(count, 4, 4), labels=np.zeros(count, int))
    world = ArraysWorld(str(tmp_path / "a.npz"), test=test)
    if drawn_images is not None:
        assert len(world.divided().test) == drawn_images
        return
    for ask in (world.divided, world.spec):
        with pytest.raises(Refusal, match=r"--world.test 0.05 of 9 images is no image, .*--world.test 1"):
            ask()
