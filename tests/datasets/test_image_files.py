"""Folders and tar shards of images: their indices, their parts, and what is wrong in them."""

from __future__ import annotations

import dataclasses
import gzip
import tarfile

import numpy as np
import pytest

from murmurate.datasets._tar_files import TarError, members
from murmurate.datasets.image_folder import FolderWorld
from murmurate.datasets.image_shards import ShardsWorld, expand
from murmurate.errors import Refusal
from pictures import encoded, number_of, picture, tar_of, write_folder, write_shards

pytest.importorskip("cv2")


def numbers(part):
    batch = part.select(range(len(part)))
    return [number_of(image.permute(1, 2, 0).numpy()) for image in batch.images], batch.labels.tolist()


def folder_world(path, **changes):
    return FolderWorld(str(path), **{"size": 16, "shortest": 20, **changes})


# -- folders ------------------------------------------------------------------------------------------


def test_a_folder_with_train_and_val(tmp_path):
    world = folder_world(write_folder(tmp_path, train=20, test=6), validation=4)
    train, validation, test = world.divided()
    assert (len(train), len(validation), len(test)) == (16, 4, 6)
    found, labels = zip(*(numbers(part) for part in (train, validation)), strict=True)
    assert sorted(found[0] + found[1]) == list(range(20))
    assert [n % 3 for n in found[0] + found[1]] == labels[0] + labels[1]
    assert sorted(numbers(test)[0]) == list(range(6))
    spec = world.spec()
    assert (spec.observation_shape, spec.actions, spec.examples) == ((3, 16, 16), 3, 16)
    assert world.spec(world.fingerprint()) == spec
    assert world.fingerprint()["classes"] == ["class0", "class1", "class2"]


def test_a_folder_with_all_three_parts_and_one_with_none(tmp_path):
    write_folder(tmp_path / "three", train=9, test=6)
    for k in range(2):
        path = tmp_path / "three" / "test" / "class1" / f"{k}.PNG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(100 + k), ".png"))
    parts = folder_world(tmp_path / "three").divided()
    assert [len(part) for part in parts] == [9, 6, 2]
    assert sorted(numbers(parts.test)[0]) == [100, 101]

    write_folder(tmp_path / "one", train=20, test=3)
    world = folder_world(tmp_path / "one" / "train", validation=0.1, test=5)
    parts = world.divided()
    assert [len(part) for part in parts] == [13, 2, 5]
    assert sorted(n for part in parts for n in numbers(part)[0]) == list(range(20))
    assert world.spec().examples == 13
    other = dataclasses.replace(world, split_seed=1).divided()
    assert list(other.test.indices) != list(parts.test.indices)


def test_files_that_are_no_images_are_passed_over(tmp_path):
    path = write_folder(tmp_path, train=6)
    (tmp_path / "train" / "class0" / "readme.txt").write_text("cats")
    (tmp_path / "train" / "class0" / ".hidden.jpg").write_text("")
    (tmp_path / "train" / ".cache").mkdir()
    deep = tmp_path / "train" / "class0" / "more"
    deep.mkdir()
    for k, name in enumerate(("x.jpeg", "y.JFIF", "z.jpe", "scraped")):
        (deep / name).write_bytes(encoded(picture(6 + k)))
    world = folder_world(path, validation=0)
    assert sorted(numbers(world.divided().train)[0]) == list(range(9))
    cause = "file without an image's ending"  # the text, and an image whose name has none
    assert world.skipped() == (f"skipped: 2 x {cause}", {cause: 2})


def test_empty_files_are_named_or_skipped(tmp_path):
    path = write_folder(tmp_path, train=6)
    empty = tmp_path / "train" / "class1" / "00001.jpg"
    empty.write_bytes(b"")
    with pytest.raises(Refusal, match=rf"{empty}: it is empty. .*skip-bad"):
        folder_world(path).divided()
    world = folder_world(path, skip_bad=True)
    assert world.divided().train.all_examples.labels.tolist() == [0, 0, 1, 2, 2]
    assert world.skipped() == ("skipped: 1 x empty file", {"empty file": 1})


def test_images_of_other_types_are_named_or_skipped(tmp_path):
    path = write_folder(tmp_path, train=6)
    other = tmp_path / "train" / "class1" / "photo.TIF"
    other.write_bytes(b"II*")
    (tmp_path / "train" / "class1" / "licence.txt").write_text("no image")
    with pytest.raises(Refusal, match=rf"{other}: it is none of .jpg, .*Convert it, or .*skip-bad"):
        folder_world(path).divided()
    world = folder_world(path, skip_bad=True)
    assert len(world.load().train) == 6
    causes = {"file without an image's ending": 1, "image of another type": 1}
    assert world.skipped() == (f"skipped: {', '.join(f'1 x {cause}' for cause in causes)}", causes)


def test_other_files_are_read_as_the_test_part_is(tmp_path):
    path = write_folder(tmp_path / "data", train=6, test=6)
    test = folder_world(path).divided().test
    files = [test.encoded.title(k) for k in range(len(test))]
    for world in (folder_world(""), ShardsWorld("", size=16, shortest=20)):  # which needs no data for it
        found = world.images(files)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, test.select(range(6)).images.numpy())
        np.testing.assert_array_equal(world.images(tmp_path / files[2]), found[2:3])
    (tmp_path / "empty.jpg").touch()
    for name, message in (("empty.jpg", "empty.jpg: .* or leave it out"), ("no.jpg", "No such file")):
        with pytest.raises(Refusal, match=message):
            folder_world("").images([files[0], tmp_path / name])


def test_folders_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(Refusal, match="say where"):
        FolderWorld().divided()
    with pytest.raises(Refusal, match="nowhere cannot be read: No such file"):
        folder_world(tmp_path / "nowhere").divided()
    with pytest.raises(Refusal, match="no folder of a class"):
        folder_world(tmp_path).divided()
    (tmp_path / "cats").mkdir()
    with pytest.raises(Refusal, match="no image in the folders"):
        folder_world(tmp_path).divided()
    write_folder(tmp_path, train=6, test=6)
    (tmp_path / "val" / "dogs").mkdir()
    with pytest.raises(Refusal, match="dogs is of a class without a folder in train"):
        folder_world(tmp_path).divided()
    with pytest.raises(Refusal, match=r"world.shortest is 10, .* Use --world.shortest 18"):
        folder_world(tmp_path, shortest=10).divided()
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="is no folder"):
        folder_world(tmp_path / "file").divided()


@pytest.mark.parametrize("change", ["name", "size", "class"])
def test_another_folder_than_a_run_began_with_is_refused(change, tmp_path):
    for name in ("one", "other"):
        write_folder(tmp_path / name, train=6)
    one, other = (folder_world(tmp_path / name) for name in ("one", "other"))
    image = tmp_path / "other" / "train" / "class0" / "00003.jpg"
    if change == "name":
        image.rename(image.with_name("00009.jpg"))
    elif change == "size":
        image.write_bytes(image.read_bytes() + b"\0")
    else:
        image.rename(tmp_path / "other" / "train" / "class1" / "00003.jpg")
    with pytest.raises(Refusal, match="is not what the run was fitted on"):
        other.check_fingerprint(one.fingerprint())
    one.check_fingerprint(one.fingerprint())


# -- tar files ----------------------------------------------------------------------------------------


LONG = "folder/" * 30 + "a-name-" * 20
NAMES = ["a.jpg", "deep/er/b.txt", LONG + ".jpg", "ümlaut.cls", "x" * 150 + "/" + "y" * 90 + ".jpg"]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_members_are_those_that_tarfile_finds(form, tmp_path):
    names = [n for n in NAMES if form != tarfile.USTAR_FORMAT or len(n) < 300]
    tar_of(tmp_path / "a.tar", [(name, name.encode() * k * 9) for k, name in enumerate(names)], form)
    with tarfile.open(tmp_path / "a.tar", "a", format=form) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        old = tarfile.TarInfo("old-folder/")
        old.type = tarfile.AREGTYPE  # as before there was a type of folders
        archive.addfile(old)
        archive.addfile(tarfile.TarInfo("last"))
    with tarfile.open(tmp_path / "a.tar") as archive:
        expected = [(m.name.encode(), m.offset_data, m.size) for m in archive if m.isfile()]
    found = list(members(tmp_path / "a.tar"))
    assert [member[:3] for member in found] == expected
    data = (tmp_path / "a.tar").read_bytes()
    for member in found:
        content = data[member.offset : member.offset + member.size]
        assert member.content in (content, None)
        assert member.content is not None or member.size > 3000


def with_size(tar, place, size):
    """``tar`` with another size in the header at ``place``, and the checksum of that header."""
    head = bytearray(tar[place : place + 512])
    head[124:136], head[148:156] = size.ljust(12, b"\0"), b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return tar[:place] + bytes(head) + tar[place + 512 :]


def test_damaged_tar_files_give_what_is_before_the_damage(tmp_path):
    tar_of(tmp_path / "a.tar", [(f"{k}.cls", b"1") for k in range(4)])
    whole = (tmp_path / "a.tar").read_bytes()
    assert with_size(whole, 1024, b"00000000001") == whole
    extended = tarfile.TarInfo("0.cls")
    extended.pax_headers = {"size": "many"}
    with tarfile.open(tmp_path / "c.tar", "w") as archive:
        archive.addfile(extended)
    with_words = (tmp_path / "c.tar").read_bytes()
    damages = {
        "cut within a header": (whole[: 2 * 1024 + 100], 2, "within a header, at byte 2,048"),
        "cut within a member": (whole[: 2 * 1024 + 512], 2, "within the member at byte 2,048"),
        "changed": (whole[:1024] + b"X" + whole[1025:], 1, "the header at byte 1,024 is damaged"),
        "size in words": (with_size(whole, 1024, b"many"), 1, "the header at byte 1,024 is damaged"),
        "size below 0": (with_size(whole, 1024, b"-1"), 1, "the header at byte 1,024 is damaged"),
        "extended size in words": (with_words, 0, "the extended header at byte 0 is damaged"),
        "text": (b"hello" * 200, 0, "the header at byte 0 is damaged"),
        "packed": (gzip.compress(whole), 0, r"compressed \(gzip\)"),
    }
    for content, count, words in damages.values():
        (tmp_path / "b.tar").write_bytes(content)
        found = []
        with pytest.raises(TarError, match=words):
            found.extend(member.name for member in members(tmp_path / "b.tar"))
        assert found == [b"%d.cls" % k for k in range(count)]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_tar_file_that_ends_within_a_long_name_is_truncated(form, tmp_path):
    path = tmp_path / "a.tar"
    tar_of(path, [("0.cls", b"1"), (LONG, b"1")], form)
    path.write_bytes(path.read_bytes()[: 1024 + 512 + 100])
    found = members(path)
    assert next(found).name == b"0.cls"
    with pytest.raises(TarError, match="it ends within the member at byte 1,024"):
        next(found)


def test_the_first_name_may_begin_like_a_compressed_file(tmp_path):
    tar_of(tmp_path / "a.tar", [("BZhou.jpg", encoded(picture(3))), ("BZhou.cls", b"0")])
    assert numbers(shards_world(tmp_path).divided().train) == ([3], [0])


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("t-{000008..000011}.tar", ["t-000008.tar", "t-000009.tar", "t-000010.tar", "t-000011.tar"]),
        ("{a,b}{1..2}", ["a1", "a2", "b1", "b2"]),
    ],
)
def test_patterns(pattern, names):
    assert expand(pattern) == names


def test_a_list_may_hold_absolute_paths_and_folders(tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("one", "two", "here")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        tar_of(folder / "a.tar", [("k.jpg", encoded(picture(number))), ("k.cls", b"0")])
    monkeypatch.chdir(folders[2])
    (tmp_path / "none").mkdir()

    def found(path):
        return set(numbers(shards_world(path).divided().train)[0])

    assert found(f"{{{folders[0]}/a.tar,{folders[1]}/a.tar}}") == {0, 1}
    assert found(f"{{{folders[1]}/,{folders[0]}/}}a.tar") == {0, 1}
    assert found(f"{{{folders[0]},{folders[1]}}}") == {0, 1}
    assert found(f"{{a.tar,{folders[1]}/a.tar}}") == {1, 2}
    world = shards_world(f"{{a.tar,{folders[1]}/a.tar}}")
    monkeypatch.chdir(tmp_path)  # a run may be resumed from another folder
    assert set(numbers(world.divided().train)[0]) == {1, 2}
    assert found("{two,one}") == {0, 1}
    with pytest.raises(Refusal, match=f"There is no tar file in {tmp_path}/none"):
        found("{two,none}")


@pytest.mark.parametrize("pattern", ["{2..1}", "{a..c}", "{0..999999}", "{0..999}{0..999}"])
def test_patterns_that_are_none(pattern):
    with pytest.raises(Refusal, match=r"range of numbers|is the most"):
        expand(pattern)


def shards_world(path, **changes):
    return ShardsWorld(str(path), **{"size": 16, "shortest": 20, "validation": 0, "test": 0, **changes})


def test_shards_give_the_images_of_their_samples(tmp_path):
    world = shards_world(write_shards(tmp_path, count=12))
    found, labels = numbers(world.divided().train)
    assert sorted(found) == list(range(12))
    assert labels == [n % 3 for n in found]
    assert (world.spec().actions, world.spec().examples) == (3, 12)
    world.check_fingerprint(world.fingerprint())
    assert [len(part) for part in shards_world(tmp_path, validation=2, test=3).divided()] == [7, 2, 3]
    (tmp_path / "test").mkdir()
    write_shards(tmp_path / "test", count=4, shards=1)
    world = shards_world(tmp_path, test_path=str(tmp_path / "test"), validation=2)
    assert [len(part) for part in world.divided()] == [10, 2, 4]
    moved = shards_world(tmp_path, test_path=str(tmp_path / "test"))
    with pytest.raises(Refusal, match="is not what the run was fitted on"):
        moved.check_fingerprint({**world.fingerprint(), "digest": ""})


def test_labels_in_json_and_other_files_of_a_sample(tmp_path):
    image = encoded(picture(3))
    files = [
        ("a/one.json", b'{"label": 2, "caption": "x"}'), ("a/one.txt", b"x"), ("a/one.jpg", image),
        ("a/two.png", encoded(picture(4), ".png")), ("a/two.seg.png", b"mask"), ("a/two.cls", b" 1\n"),
        ("b/two.jpg", image), ("b/two.JSON", b'{"cls": 0}'),
    ]  # fmt: skip
    tar_of(tmp_path / "a.tar", files)
    found, labels = numbers(shards_world(tmp_path / "a.tar").divided().train)
    assert sorted(zip(found, labels, strict=True)) == [(3, 0), (3, 2), (4, 1)]


SAMPLES = {
    "no label": ([("k.jpg", b"1")], "sample without a label", "it has no .cls and no .json"),
    "no image": ([("k.cls", b"1")], "sample without an image", "has no image, only cls"),
    "a wrong label": ([("k.jpg", b"1"), ("k.cls", b"cat")], "sample without a label", "label is 'cat'"),
    "a negative label": ([("k.jpg", b"1"), ("k.cls", b"-1")], "sample without a label", "label is '-1'"),
    "a label of another kind": (
        [("k.jpg", b"1"), ("k.json", b'{"cls": true}')],
        "sample without a label",
        "with no integer from 0",
    ),
    "json of no object": ([("k.jpg", b"1"), ("k.json", b"[1]")], "sample without a label", "no integer"),
    "json with other keys": (
        [("k.jpg", b"1"), ("k.json", b'{"lbl": 1}')],
        "sample without a label",
        "no integer from 0 to 999,999 under cls, label, class or target",
    ),
    "an empty image": ([("k.jpg", b""), ("k.cls", b"1")], "empty file", "its image is empty"),
}


@pytest.mark.parametrize("what", SAMPLES)
def test_damaged_samples_are_named_or_skipped(what, tmp_path):
    files, cause, detail = SAMPLES[what]
    good = [("g.jpg", encoded(picture(5))), ("g.cls", b"0")]
    tar_of(tmp_path / "a.tar", [*files, *good])
    with pytest.raises(Refusal, match=rf"a.tar, sample k: .*{detail}.*--world.skip-bad true"):
        shards_world(tmp_path).divided()
    world = shards_world(tmp_path, skip_bad=True)
    assert numbers(world.divided().train) == ([5], [0])
    assert world.skipped() == (f"skipped: 1 x {cause}", {cause: 1})


def test_damaged_shards_are_named_or_kept_up_to_the_damage(tmp_path):
    write_shards(tmp_path, count=9)
    path = tmp_path / "000001.tar"
    last = list(members(path))[-2]
    path.write_bytes(path.read_bytes()[: last.offset + 10])
    with pytest.raises(Refusal, match=r"000001.tar: it ends within .*skip-bad"):
        shards_world(tmp_path).divided()
    world = shards_world(tmp_path, skip_bad=True)
    train = world.divided().train
    assert sorted(numbers(train)[0]) == [0, 1, 2, 3, 4, 5, 6, 8]
    assert world.skipped()[1]["damaged tar file"] == 1
    (tmp_path / "000002.tar").write_bytes(gzip.compress(b"x"))
    with pytest.raises(Refusal, match="compressed"):
        shards_world(tmp_path, skip_bad=True, size=8).divided()


def test_shards_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(Refusal, match="say where"):
        ShardsWorld().divided()
    with pytest.raises(Refusal, match="no tar file"):
        shards_world(tmp_path).divided()
    with pytest.raises(Refusal, match=r"000001.tar cannot be read"):
        shards_world(tmp_path / "{000001..000002}.tar").divided()
    write_shards(tmp_path)
    with pytest.raises(Refusal, match=r"label 2, and world.classes is 2: .*--world.classes 3"):
        shards_world(tmp_path, classes=2).divided()
    assert shards_world(tmp_path, classes=5).spec().actions == 5
    tar_of(tmp_path / "none.tar", [])
    with pytest.raises(Refusal, match="no image with a label"):
        shards_world(tmp_path / "none.tar").divided()
