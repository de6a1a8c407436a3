"""Folders and tar files of images that are not laid out as they should be: what is refused, and how."""

from __future__ import annotations

import gzip
import os
import re
import tarfile

import pytest

from murmurate.datasets.image_folder import FolderWorld
from murmurate.datasets.image_shards import ShardsWorld
from murmurate.errors import Refusal
from murmurate.training.data_record import refuse_missing
from pictures import encoded, picture, tar_of, write_folder, write_shards

pytest.importorskip("cv2")


def folder_world(path, **changes):
    return FolderWorld(str(path), **{"size": 16, "shortest": 20, **changes})


def shards_world(path, **changes):
    return ShardsWorld(str(path), **{"size": 16, "shortest": 20, "validation": 0, "test": 0, **changes})


# -- folders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("renamed", "words"),
    [
        ({"train": "Train", "val": "Val"}, "Train has the name of a part, .*Rename it to train"),
        ({"val": "Val"}, "Val has the name of a part, .*Rename it to val"),
        ({"train": "training", "val": "testing"}, "testing has the name of a part, .*Rename it to test"),
        ({"train": "test"}, "no folder train in .*, only test, val"),
    ],
)
def test_folders_of_parts_with_other_names_are_refused(renamed, words, tmp_path):
    write_folder(tmp_path, train=6, test=3)
    for name, other in renamed.items():
        (tmp_path / name).rename(tmp_path / other)
    with pytest.raises(Refusal, match=words):
        folder_world(tmp_path).divided()


def test_two_folders_for_validation_are_refused(tmp_path):
    write_folder(tmp_path, train=6, test=3)
    (tmp_path / "validation").mkdir()
    with pytest.raises(Refusal, match="has the folders val and validation, each a validation part"):
        folder_world(tmp_path).divided()


def test_classes_may_be_called_like_parts_beside_others(tmp_path):
    write_folder(tmp_path, train=6, test=3)
    (tmp_path / "train" / "class0").rename(tmp_path / "train" / "Train")
    world = folder_world(tmp_path / "train", test=1)
    assert world.fingerprint()["classes"] == ["Train", "class1", "class2"]


@pytest.mark.parametrize("part", ["val", "Test"])
def test_a_part_beside_folders_of_classes_is_no_class(part, tmp_path):
    write_folder(tmp_path, train=6, test=3)
    (tmp_path / "val").rename(tmp_path / "train" / part)
    with pytest.raises(Refusal, match=rf"/{part} has folders of the classes .*Move those into .*/train"):
        folder_world(tmp_path / "train").divided()


def test_names_of_classes_are_utf_8_and_names_of_files_need_not_be(tmp_path):
    write_folder(tmp_path, train=6, test=3)
    train = tmp_path / "train"
    first = next((train / "class0").iterdir())
    first.rename(train / "class0" / os.fsdecode(b"\xff.jpg"))
    assert len(folder_world(tmp_path).divided().train) > 0
    (train / "class1").rename(train / os.fsdecode(b"\xff"))
    (tmp_path / "val" / "class1").rename(tmp_path / "val" / os.fsdecode(b"\xff"))
    with pytest.raises(Refusal, match=r"the name of this class is no UTF-8\. Rename the folder"):
        folder_world(tmp_path, shortest=21).divided()


def test_a_test_part_that_is_the_training_part_is_refused(tmp_path):
    write_folder(tmp_path, train=6)
    (tmp_path / "test").symlink_to(tmp_path / "train")
    with pytest.raises(Refusal, match=r"test is .*train itself: give it images that are not trained on"):
        folder_world(tmp_path).divided()


def test_a_class_folder_without_an_image_is_refused(tmp_path):
    write_folder(tmp_path, train=6, test=3)
    (tmp_path / "train" / "class3").mkdir()
    with pytest.raises(Refusal, match=r"no image in .*train/class3: .*Remove the folder"):
        folder_world(tmp_path).divided()


def test_a_class_with_test_images_alone_is_refused(tmp_path):
    write_folder(tmp_path, train=6, test=3)
    for path in (tmp_path / "train" / "class2").iterdir():
        path.write_bytes(b"")
    with pytest.raises(
        Refusal, match=r"val: 1 of 3 images are of classes without a training image .*, such as class2\. Add"
    ):
        folder_world(tmp_path, skip_bad=True).divided()


def test_hidden_files_and_those_of_macos_are_passed_over(tmp_path):
    write_folder(tmp_path, train=6, test=3)
    for folder in (tmp_path / "train" / "__MACOSX", tmp_path / "train" / "class0" / "__MACOSX"):
        folder.mkdir()
        (folder / "0.jpg").write_bytes(b"junk")
    (tmp_path / "train" / "class0" / "._0.jpg").write_bytes(b"junk")
    world = folder_world(tmp_path, validation=0)
    assert (len(world.divided().train), world.spec().actions) == (6, 3)


@pytest.mark.parametrize("target", ["..", ".", "../../class1"])
def test_a_loop_of_symbolic_links_is_named(target, tmp_path):
    write_folder(tmp_path, train=6, test=3)
    link = tmp_path / "train" / "class0" / "link"
    link.parent.joinpath("deep").mkdir()
    link = link.parent / "deep" / "link"
    link.symlink_to(target)
    if target == "../../class1":  # no loop, as long as there is no link back
        assert len(folder_world(tmp_path, validation=0).divided().train) == 8
        (tmp_path / "train" / "class1" / "back").symlink_to(link.parent)
        link = link / "back"
    with pytest.raises(Refusal, match=f"{link} is a symbolic link to .*, a folder that .*Remove the link"):
        folder_world(tmp_path, size=8).divided()  # another size, because what has been read is kept


def test_a_link_to_itself_is_named(tmp_path):
    write_folder(tmp_path, train=6, test=3)
    link = tmp_path / "train" / "class0" / "link.jpg"
    link.symlink_to(link)
    with pytest.raises(Refusal, match=f"{link} is a symbolic link to itself, .*Remove the link"):
        folder_world(tmp_path).divided()


# -- tar files ----------------------------------------------------------------------------------------


def test_a_compressed_tar_file_has_one_remedy(tmp_path):
    write_shards(tmp_path, shards=1)
    path = tmp_path / "000000.tar"
    path.write_bytes(gzip.compress(path.read_bytes()))
    for skip_bad in (False, True):
        with pytest.raises(
            Refusal, match=r"0.tar: it is compressed \(gzip\), .*gzip -dc \w+ > \w+\.$"
        ) as refused:
            shards_world(path, skip_bad=skip_bad).divided()
        assert "skip-bad" not in str(refused.value)


@pytest.mark.parametrize(
    ("label", "detail"),
    [
        ({}, "it has no .cls and no .json"),
        ({"cls": b"cat"}, "its label is 'cat'"),
        ({"json": b'{"lbl": 1}'}, "under cls, label, class or target"),
    ],
)
def test_labels_that_are_all_missing_cannot_be_skipped(label, detail, tmp_path):
    files = {"jpg": encoded(picture(3)), **label}
    tar_of(tmp_path / "a.tar", [(f"{k}.{kind}", data) for k in range(3) for kind, data in files.items()])
    with pytest.raises(
        Refusal, match=f"sample 0: .*{detail}.*no other image .* from 0 up, into key.cls"
    ) as refused:
        shards_world(tmp_path).divided()
    assert "skip-bad" not in str(refused.value)
    with pytest.raises(
        Refusal, match=r"no image with a label: .*cls, label, class or target, .*into key.cls"
    ):
        shards_world(tmp_path, skip_bad=True).divided()


def test_a_wrong_label_among_right_ones_is_to_be_corrected(tmp_path):
    files = [("0.jpg", b"1"), ("0.cls", b"-1"), ("1.jpg", b"1"), ("1.cls", b"1")]
    tar_of(tmp_path / "a.tar", files)
    with pytest.raises(Refusal, match=r"label is '-1', .* Correct the label, or .*--world.skip-bad true"):
        shards_world(tmp_path).divided()


@pytest.mark.parametrize("name", ["train-*.tar", "train-00000?.tar"])
def test_a_pattern_of_a_shell_is_refused(name, tmp_path):
    with pytest.raises(Refusal, match=rf"{re.escape(name)} has a \* or \?, .*Name a folder"):
        shards_world(tmp_path / name).divided()


@pytest.mark.parametrize("pattern", ["gone/{000..003}.tar", "gone/train-{000..003}.tar"])
def test_a_folder_of_shards_that_is_gone_is_missing(pattern, tmp_path):
    world = shards_world(tmp_path / pattern)
    with pytest.raises(Refusal, match=r"which the run began with\. .* --world\.path NEW"):
        refuse_missing(world)
    (tmp_path / "gone").mkdir()
    refuse_missing(world)


def test_a_tar_file_that_is_named_twice_is_refused(tmp_path):
    pattern = write_shards(tmp_path, shards=2)
    with pytest.raises(Refusal, match=r"000001\.tar more than once"):
        shards_world(tmp_path / "{000000,000001,000001}.tar").divided()
    (tmp_path / "other").symlink_to(tmp_path)
    with pytest.raises(Refusal, match=r"000001\.tar is in both world.path and world.test_path"):
        shards_world(pattern, test_path=str(tmp_path / "other" / "000001.tar")).divided()


def test_test_images_of_other_classes_than_the_training_images_are_refused(tmp_path):
    for name, classes in (("train", 2), ("test", 3)):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, count=6, shards=1, classes=classes)
    with pytest.raises(
        Refusal, match=r"test: 2 of 6 images have labels that no training image has, such as 2"
    ):
        shards_world(tmp_path / "train", test_path=str(tmp_path / "test")).divided()


def test_hidden_members_and_those_of_macos_are_passed_over(tmp_path):
    image = encoded(picture(3))
    files = [
        ("./._a.jpg", b"junk"), ("./a.jpg", image), ("./a.cls", b"0"),
        ("__MACOSX/._a.jpg", b"junk"), ("__MACOSX/a.jpg", b"junk"), ("b/.DS_Store", b"junk"),
    ]  # fmt: skip
    tar_of(tmp_path / "a.tar", files)
    (tmp_path / "._a.tar").write_bytes(b"junk")
    assert len(shards_world(tmp_path).divided().train) == 1


def test_the_error_for_a_sample_without_an_image_names_what_it_has(tmp_path):
    latin1 = os.fsdecode(b"b.caf\xe9")
    files = [("a.jpg", encoded(picture(3))), ("a.cls", b"0"), (latin1, b"text")]
    tar_of(tmp_path / "a.tar", files)
    with pytest.raises(Refusal, match=r"it has no image, only caf.*--world.skip-bad true"):
        shards_world(tmp_path).divided()
    assert len(shards_world(tmp_path, skip_bad=True).divided().train) == 1


NAMES = ["deep/er/broken.jpg", "ümlaut/broken.jpg", "x" * 150 + "/broken.jpg", "y/" * 99 + "z" * 120 + ".jpg"]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("name", NAMES)
def test_the_error_for_a_broken_image_names_its_sample(name, form, tmp_path):
    key = os.path.splitext(name)[0]
    files = [("a.jpg", encoded(picture(3))), ("a.cls", b"0"), (name, b"junk"), (f"{key}.cls", b"0")]
    tar_of(tmp_path / "a.tar", files, form)
    train = shards_world(tmp_path).divided().train
    with pytest.raises(Refusal, match=rf"a.tar, sample {key}: it begins with .*--world.skip-bad true"):
        train.select([0, 1])
    (tmp_path / "a.tar").unlink()
    assert re.fullmatch(r".*a.tar, the image at byte [0-9,]+", train.all_examples.encoded.title(1))
