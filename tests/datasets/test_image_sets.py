"""Fashion-MNIST, CIFAR-10 and CIFAR-100 from their files, and what is wrong in these."""

from __future__ import annotations

import dataclasses
import gzip
import struct

import numpy as np
import pytest
import torch

from murmurate.datasets import image_fashion
from murmurate.datasets.image_cifar10 import Cifar10World
from murmurate.datasets.image_cifar100 import Cifar100World
from murmurate.datasets.image_fashion import FashionWorld
from murmurate.datasets.image_set import ImageSet
from murmurate.errors import Refusal
from pictures import drawn, write_cifar10, write_cifar100, write_fashion, write_idx


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion(suffix, tmp_path):
    world = FashionWorld(write_fashion(tmp_path, suffix=suffix), validation=5)
    train, validation, test = world.divided()
    assert (len(train), len(validation), len(test)) == (35, 5, 10)
    assert sorted([*train.indices, *validation.indices]) == list(range(40))
    batch = train.select([2, 0, 2])
    assert batch.images.shape == (3, 1, 28, 28)
    assert batch.images.dtype == torch.uint8
    which = train.indices[[2, 0, 2]]
    np.testing.assert_array_equal(batch.images[:, 0].numpy(), drawn(40, 28, 28, seed=40)[which])
    assert batch.labels.tolist() == (which % 10).tolist()
    spec = world.spec()
    assert (spec.observation_shape, spec.actions, spec.examples, spec.images) == ((1, 28, 28), 10, 35, True)


def test_cifar10(tmp_path):
    world = Cifar10World(write_cifar10(tmp_path), validation=0.1)
    train, validation, test = world.divided()
    assert (len(train), len(validation), len(test)) == (36, 4, 8)
    batch = test.select(np.arange(8))
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_array_equal(batch.images.flatten(1).numpy(), drawn(8, 3072, seed=5))
    assert batch.labels.tolist() == list(range(8))
    assert (world.spec().observation_shape, world.spec().actions) == ((3, 32, 32), 10)


@pytest.mark.parametrize("coarse", [False, True])
def test_cifar100(coarse, tmp_path):
    world = Cifar100World(write_cifar100(tmp_path), coarse=coarse, validation=0.1)
    train, validation, test = world.divided()
    assert (len(train), len(validation), len(test)) == (36, 4, 8)
    batch = test.select(np.arange(8))
    np.testing.assert_array_equal(batch.images.flatten(1).numpy(), drawn(8, 3072, seed=8))
    assert batch.labels.tolist() == [k if coarse else 99 - k for k in range(8)]
    assert (world.spec().observation_shape, world.spec().actions) == ((3, 32, 32), 20 if coarse else 100)
    assert world.fingerprint()["classes"][3] == ("coarse_3" if coarse else "fine_3")
    other = dataclasses.replace(world, coarse=not coarse)
    with pytest.raises(Refusal, match="is not what the run was fitted on"):
        other.check_fingerprint(world.fingerprint(), thorough=False)


def jpegs(path, count=6, damaged=()):
    cv2 = pytest.importorskip("cv2")
    arrays = {"classes": np.array(["cat", "dog"])}
    for part in ("train", "test"):
        flat = [np.full((32, 32, 3), (40 * k, 100, 255 - 40 * k), np.uint8) for k in range(count)]
        files = [cv2.imencode(".jpg", image[:, :, ::-1])[1] for image in flat]
        for k in damaged:
            files[k] = files[k][:20]
        arrays[f"{part}_jpeg"] = np.concatenate(files)
        arrays[f"{part}_offset"] = np.cumsum([0, *map(len, files)])
        arrays[f"{part}_label"] = np.arange(count, dtype=np.uint8) % 2
    np.savez(path, **arrays)
    return arrays


def test_cifar10_as_jpeg_files(tmp_path):
    jpegs(tmp_path / "cifar.npz")
    world = Cifar10World(str(tmp_path / "cifar.npz"), validation=1)
    train, _, test = world.divided()
    assert len(train) == 5
    for k, image in enumerate(test.select(range(6)).images):
        red, green, blue = image.float().mean((1, 2)).tolist()
        assert (red, green, blue) == pytest.approx((40 * k, 100, 255 - 40 * k), abs=3)
    assert world.spec(world.fingerprint()) == world.spec()
    jpegs(tmp_path / "damaged.npz", damaged=[3])
    with pytest.raises(Refusal, match=r"damaged.npz, train image 3 \(from 0\): .*Restore"):
        Cifar10World(str(tmp_path / "damaged.npz")).divided()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_offset": np.array([0, 5, 3, 8, 9, 10, 11])}, "train_offset is not the offsets of 6"),
        ({"train_offset": np.arange(7) * 10**6}, "train_offset points outside train_jpeg"),
        ({"test_label": np.full(6, 2, np.uint8)}, r"image 0 \(from 0\) has the label 2"),
        ({"test_label": np.array(list("010101"))}, r"test_label is <U1 \[6\], and not integers"),
        ({"test_label": np.full(6, 0.5)}, "test_label is float64"),
        ({"test_label": np.zeros((6, 1), int)}, r"test_label is int64 \[6, 1\]"),
        ({"test_jpeg": None}, "no array test_jpeg"),
        ({"classes": np.array([object()])}, "classes is an array of Python objects"),
    ],
)
def test_jpeg_files_that_are_wrong_are_refused(change, words, tmp_path):
    arrays = jpegs(tmp_path / "cifar.npz") | change
    np.savez(tmp_path / "cifar.npz", **{name: x for name, x in arrays.items() if x is not None})
    with pytest.raises(Refusal, match=words):
        Cifar10World(str(tmp_path / "cifar.npz")).divided()


WRONG_IDX = {
    "short": (b"\0\0\x08", "ends in its header"),
    "labels for images": (struct.pack(">HBBII8x", 0, 8, 1, 2, 0), "begins with 00000801, not with 00000803"),
    "floats": (struct.pack(">HBBIII", 0, 13, 3, 1, 1, 1), "begins with 00000d03"),
    "too few": (struct.pack(">HBBIII8x", 0, 8, 3, 3, 2, 2), "promises 12 bytes"),
    "too many": (struct.pack(">HBBIII9x", 0, 8, 3, 2, 2, 2), "more bytes than the 8"),
    "a huge promise": (struct.pack(">HBBIII", 0, 8, 3, 2**31, 2**31, 99), "there cannot be so many"),
}


@pytest.mark.parametrize("what", WRONG_IDX)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_damaged_idx_files_are_refused(what, suffix, tmp_path):
    write_fashion(tmp_path, suffix=suffix)
    content, words = WRONG_IDX[what]
    path = tmp_path / f"train-images-idx3-ubyte{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(Refusal, match=words) as refused:
        FashionWorld(str(tmp_path)).divided()
    assert str(path) in str(refused.value)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    write_fashion(tmp_path, suffix=".gz")
    packed = tmp_path / "train-images-idx3-ubyte.gz"
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Refusal, match=r"train-images-idx3-ubyte.gz is no idx file"):
        FashionWorld(str(tmp_path)).divided()
    packed.write_bytes(whole)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    write_idx(labels, np.zeros(39, np.uint8))
    with pytest.raises(Refusal, match=r"40 images of 28 x 28 .* 39 labels"):
        FashionWorld(str(tmp_path)).divided()
    write_idx(labels, np.full(40, 10, np.uint8))
    with pytest.raises(Refusal, match="has the label 10"):
        FashionWorld(str(tmp_path)).divided()
    labels.unlink()
    with pytest.raises(Refusal, match=r"no train-labels-idx1-ubyte.*apt-get install"):
        FashionWorld(str(tmp_path)).divided()


def test_without_a_path_the_debian_package_is_read_or_named(tmp_path, monkeypatch):
    monkeypatch.setattr(image_fashion, "_DEBIAN", tmp_path)
    write_fashion(tmp_path)
    assert FashionWorld().spec().examples == 39
    monkeypatch.setattr(image_fashion, "_DEBIAN", tmp_path / "none")
    with pytest.raises(
        Refusal, match=r"apt-get install dataset-fashion-mnist. .*github.com/zal.*--world.path"
    ):
        FashionWorld().spec()


def test_cifar10_that_cannot_be_used_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(Refusal, match=r"--world.path FOLDER"):
        Cifar10World().divided()
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02}")
    for path in (tmp_path, tmp_path / "data_batch_1"):
        with pytest.raises(Refusal, match=r"pickles may run code and are not read: .*cifar-10-binary"):
            Cifar10World(str(path)).divided()
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(b"x" * 3072)
    with pytest.raises(Refusal, match=r"data_batch_3.bin has 3,072 bytes, .*multiple of the 3,073"):
        Cifar10World(str(tmp_path)).divided()
    with pytest.raises(Refusal, match="nowhere cannot be read: No such file"):
        Cifar10World(str(tmp_path / "nowhere")).divided()


def test_cifar100_that_cannot_be_used_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(Refusal, match=r"--world.path FOLDER"):
        Cifar100World().divided()
    with pytest.raises(Refusal, match=r"no train.bin in .*Unpack cifar-100-binary.tar.gz, and name"):
        Cifar100World(str(tmp_path)).divided()
    (tmp_path / "meta").write_bytes(b"\x80\x02}")
    with pytest.raises(Refusal, match=r"pickles may run code and are not read: unpack cifar-100-binary"):
        Cifar100World(str(tmp_path)).divided()
    write_cifar100(tmp_path)
    records = (tmp_path / "test.bin").read_bytes()
    (tmp_path / "test.bin").write_bytes(records[:3073])
    with pytest.raises(Refusal, match=r"test.bin has 3,073 bytes, .*multiple of the 3,074"):
        Cifar100World(str(tmp_path)).divided()
    (tmp_path / "test.bin").write_bytes(bytes([0, 100]) + records[2:])
    with pytest.raises(Refusal, match=r"image 0 .*label 100, and there are 100 classes"):
        Cifar100World(str(tmp_path)).divided()
    (tmp_path / "test.bin").write_bytes(records)
    (tmp_path / "fine_label_names.txt").write_text("apple\n")
    with pytest.raises(Refusal, match=r"fine_label_names.txt has 1 names, not 100"):
        Cifar100World(str(tmp_path)).divided()


@pytest.mark.parametrize(
    ("kind", "write", "name"),
    [
        (FashionWorld, write_fashion, "train-images-idx3-ubyte"),
        (Cifar10World, write_cifar10, "data_batch_2.bin"),
        (Cifar100World, write_cifar100, "train.bin"),
    ],
)
def test_other_images_than_a_run_began_with_are_refused(kind, write, name, tmp_path):
    for folder in ("one", "copy", "changed"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder)
    path = tmp_path / "changed" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    one, copy, changed = (kind(str(tmp_path / folder)) for folder in ("one", "copy", "changed"))
    one.check_fingerprint(copy.fingerprint())
    assert one.spec(copy.fingerprint()) == one.spec()
    one.check_fingerprint(changed.fingerprint(), thorough=False)  # as many of the same size
    with pytest.raises(Refusal, match=r"is not what the run was fitted on: .*murmurate resume"):
        one.check_fingerprint(changed.fingerprint())
    with pytest.raises(Refusal, match=r"99 \+ "):
        one.check_fingerprint(copy.fingerprint() | {"train": 99}, thorough=False)


def test_arrays_of_another_kind_are_no_images():
    with pytest.raises(ValueError, match="pixels are float64"):
        ImageSet(np.zeros((2, 3, 3, 1)), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="labels are"):
        ImageSet(np.zeros((2, 3, 3, 1), np.uint8), np.zeros(3, np.int64))
