"""Images decoded by processes: alike with any number of them; none is lost or repeated if one is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from laws.problems import same
from murmurate.datasets.image_augmentation import Augmentation
from murmurate.datasets.image_folder import FolderWorld
from murmurate.datasets.image_shards import ShardsWorld
from murmurate.errors import RunFailed
from murmurate.sources import image_processes
from murmurate.sources.encoded_images import EncodedImageSource
from murmurate.sources.examples import ExampleOrder
from murmurate.sources.image_memory import MemoryLayout
from murmurate.sources.image_worker import WorkerSettings
from pictures import number_of, write_folder, write_shards
from sources.deaths import died_at_start
from waiting import until

pytest.importorskip("cv2")
SIZE, BATCH = 16, 5
AUGMENT = Augmentation(crop="resized", area=(0.3, 1.0), flip=True, brightness=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("images"), train=26)


def world_of(path, **changes):
    kind = ShardsWorld if path.endswith(".tar") else FolderWorld
    return kind(path, size=SIZE, shortest=20, validation=0, test=0, **changes)


def source(path, workers, *, rank=0, replicas=1, augment=AUGMENT, prefetch=2, batch=BATCH, **changes):
    train = world_of(path, **changes).divided().train
    order = ExampleOrder(len(train), seed=1, rank=rank, replicas=replicas)
    layout = MemoryLayout(1 + prefetch, batch, (SIZE, SIZE, 3), workers)
    settings = WorkerSettings(0, layout, 0, augment, 20, key=7)
    return EncodedImageSource(train.all_examples, train.indices, order, settings, rank)


def taken(it, batches):
    """The images of some batches, copied, and their numbers."""
    found = []
    for _ in range(batches):
        data = next(it).data
        pixels = data.images.permute(0, 2, 3, 1).numpy()
        found.append((data.images.clone(), data.labels.tolist(), [number_of(image) for image in pixels]))
    return found


def numbers(batches):
    return [number for _, _, found in batches for number in found]


def test_any_number_of_processes_gives_the_same_batches(path):
    found = []
    for workers in (0, 1, 3):
        it = source(path, workers)
        found.append(taken(it, 7))
        assert it.fields()["passes"] == pytest.approx(35 / 26)
        it.close()
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert sorted(numbers(found[0])[:26]) == list(range(26))
    for images, labels, which in found[0]:
        assert images.shape[1:] == (3, SIZE, SIZE)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels == [number % 3 for number in which]


def test_shards_give_every_image_once_to_one_of_the_replicas(tmp_path):
    path = write_shards(tmp_path, count=24)
    parts = []
    for rank in range(2):
        it = source(path, 2, rank=rank, replicas=2, batch=4)
        parts.append(numbers(taken(it, 3)))
        it.close()
    assert len(parts[0]) == len(parts[1]) == 12
    assert sorted(parts[0] + parts[1]) == list(range(24))


def test_a_resumed_source_goes_on_where_it_stopped_whatever_was_decoded_ahead(path):
    whole = source(path, 0)
    expected = taken(whole, 9)
    whole.close()
    for first, then in ((2, 1), (1, 0)):
        it = source(path, first, prefetch=4)
        begun = taken(it, 4)
        state = it.state()
        it.close()
        again = source(path, then, prefetch=1)
        again.load(state)
        assert same(begun + taken(again, 5), expected)
        again.close()


def test_a_joiner_and_a_source_that_is_loaded_while_it_decodes(path):
    for workers in (0, 1):
        it = source(path, workers)
        expected = taken(it, 6)
        it.fresh_start(3)
        assert same(taken(it, 3), expected[3:])
        assert len(it.pids) == workers
        it.close()


def test_a_process_that_is_killed_is_started_again_and_nothing_changes(path):
    whole = source(path, 0)
    expected = taken(whole, 8)
    whole.close()
    it = source(path, 2)
    found = taken(it, 2)
    for pid in it._processes.pids:
        os.kill(pid, signal.SIGKILL)
    found += taken(it, 6)
    assert same(found, expected)
    assert [kind for kind, _ in it.events()] == ["decoder died"] * 2
    assert it.fields()["decoder_deaths"] == 2
    it.close()


def test_a_process_that_is_stopped_is_replaced(path, monkeypatch):
    monkeypatch.setattr(image_processes, "_STOPPED_SECONDS", 0.3)
    it = source(path, 1)
    found = taken(it, 1)
    os.kill(it._processes.pids[0], signal.SIGSTOP)
    found += taken(it, 6)
    assert sorted(numbers(found)[:26]) == list(range(26))
    it.close()


def learn(path, rank, seen):
    """As a replica's process, with its decoders: sends what it sees, and the state after it."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    it = source(path, 2, rank=rank, replicas=2)
    while True:
        found = numbers(taken(it, 1))
        seen.send(json.dumps([found, it.state(), it.pids]))


def test_replicas_killed_in_the_middle_of_a_pass_and_resumed_see_every_image_once(path):
    seen, pids = [], []
    for rank in range(2):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=learn, args=(path, rank, theirs), daemon=True
        )
        process.start()
        theirs.close()
        for _ in range(1 + rank):  # killed after one batch, and after two
            found, state, decoders = json.loads(ours.recv())
            seen += found
        process.kill()
        process.join()
        ours.close()
        pids += decoders
        it = source(path, 1, rank=rank, replicas=2)
        it.load(state)
        rest = 13 - BATCH * (1 + rank)
        seen += numbers(taken(it, -(-rest // BATCH)))[:rest]
        it.close()
    assert sorted(seen) == list(range(26))
    # the decoding processes ended with those that started them
    assert len(pids) == 4
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def damaged(tmp_path):
    path = write_folder(tmp_path, train=26)
    broken = sorted(Path(path, "train").glob("*/*.jpg"))[4]
    broken.write_bytes(broken.read_bytes()[:-40])
    return path, broken


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_ends_the_run_or_is_left_out(workers, tmp_path):
    path, broken = damaged(tmp_path)
    whole = source(path, workers)
    with pytest.raises(RunFailed, match=rf"{broken}: its end is missing. .*--world.skip-bad true"):
        taken(whole, 6)
    whole.close()
    it = source(path, workers, skip_bad=True)
    found = taken(it, 6)
    missing = int(broken.stem)
    assert sorted(numbers(found)[:25]) == [k for k in range(26) if k != missing]
    assert sorted(len(which) for _, _, which in found)[:2] == [4, 5]
    assert it.fields()["skipped_images"] == 1
    assert [kind for kind, _ in it.events()] == ["skipped"]
    again = source(path, workers, skip_bad=True)
    again.load(it.state())
    assert again.fields()["skipped_images"] == 1
    it.close()
    again.close()


def test_a_broken_image_whose_name_is_no_utf_8_can_be_recorded(tmp_path):
    path = write_folder(tmp_path, train=12)
    image = next(Path(path, "train", "class0").iterdir())
    image.unlink()
    image.with_name(os.fsdecode(b"\xff.jpg")).write_bytes(b"text")
    it = source(path, 0, skip_bad=True)
    taken(it, 3)
    ((_, message),) = it.events()
    assert message.encode().endswith(b"it is left out")
    it.close()
    it = source(path, 0)
    with pytest.raises(RunFailed, match=r"\\udcff\.jpg: it begins with .* no JPEG"):
        taken(it, 3)
    it.close()


def test_a_set_in_which_nothing_can_be_decoded_ends_the_run(tmp_path):
    path = write_folder(tmp_path, train=12)
    for image in Path(path, "train").glob("*/*.jpg"):
        image.write_bytes(b"text")
    it = source(path, 0, skip_bad=True)
    with pytest.raises(
        RunFailed, match=r"No image of a whole pass could be decoded \(15 x not an image\)\. Check"
    ):
        next(it)
    it.close()
    heartbeats = []
    it = source(path, 0, skip_bad=True)
    it.alive = lambda played: heartbeats.append(played) or len(heartbeats) == 2
    assert next(it).data is None  # a stop is obeyed within the pass
    it.close()


def decode_by(program, folder, monkeypatch):
    """From now on decoder processes run ``program``."""
    (folder / "other_decoder.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(image_processes, "_MODULE", "other_decoder")


DYING = """
import os, signal
from murmurate.sources import image_worker
plain = image_worker.decode_augmented
def dying(place, *others):
    if place.path.endswith("00007.jpg"):
        os.kill(os.getpid(), signal.SIGKILL)
    plain(place, *others)
image_worker.decode_augmented = dying
image_worker.main()
"""


def test_an_image_that_kills_its_decoder_is_named_or_left_out(path, tmp_path, monkeypatch):
    """As a fault in the decoding library would have it."""
    decode_by(DYING, tmp_path, monkeypatch)
    it = source(path, 2)
    with pytest.raises(RunFailed, match=r"00007.jpg: it makes the decoder crash. .*--world.skip-bad true"):
        taken(it, 6)
    it.close()
    it = source(path, 2, skip_bad=True)
    assert sorted(numbers(taken(it, 6))[:25]) == [k for k in range(26) if k != 7]
    assert [kind for kind, _ in it.events()] == ["decoder died", "decoder died", "skipped"]
    it.close()


FLAKY = """
import os, signal
from pathlib import Path
from murmurate.datasets._image_headers import ImageError
from murmurate.sources import image_worker
plain, died, failed = image_worker.decode_augmented, Path(__file__).with_name("died"), []
def flaky(place, *others):
    if died.exists():
        return plain(place, *others)
    if failed:
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    failed.append(place)
    raise ImageError("unreadable file", "it cannot be read (Stale file handle)")
image_worker.decode_augmented = flaky
image_worker.main()
"""


def test_what_a_decoder_could_not_read_before_it_died_is_read_again(path, tmp_path, monkeypatch):
    """As where a network disk comes back."""
    decode_by(FLAKY, tmp_path, monkeypatch)
    it = source(path, 1)
    assert sorted(numbers(taken(it, 6))[:26]) == list(range(26))
    assert [kind for kind, _ in it.events()] == ["decoder died"]
    it.close()


def test_a_decoder_that_cannot_start_ends_the_run(path, monkeypatch):
    monkeypatch.setattr(image_processes, "_MODULE", "no_such_module")
    monkeypatch.setattr(image_processes, "_CHECK_SECONDS", 0.01)
    it = source(path, 1)
    with pytest.raises(RunFailed, match=r"decoding process 0 of replica 0 died 5 times .*exit code 1"):
        next(it)
    it.close()


def test_a_decoder_that_died_before_it_got_its_settings_can_be_replaced():
    process = died_at_start()
    image_processes._Decoder(0, process).kill()
    assert process.stdin.closed


def test_memory_is_bounded_by_the_slots(path):
    it = source(path, 1, prefetch=2)
    taken(it, 12)
    assert it._processes.memory.assigned <= 12 + 3
    assert it._processes.memory.pixels.shape == (3, BATCH, SIZE, SIZE, 3)
    it.close()


def test_a_stop_is_obeyed_while_images_are_decoded(path):
    it = source(path, 1)
    pid = it._opened_processes()
    os.kill(pid.pids[0], signal.SIGSTOP)
    it.alive = lambda played: True
    assert next(it).data is None
    it.close()


def test_augmentation_changes_images_alike_in_every_process(path):
    augment = Augmentation(
        crop="multi-scale",
        shortest=(16, 30),
        padding=2,
        flip=True,
        brightness=0.4,
        contrast=0.4,
        lighting=0.1,
    )
    one, other = source(path, 0, augment=augment), source(path, 2, augment=augment)
    first = [next(one).data.images.clone() for _ in range(3)]
    second = [next(other).data.images.clone() for _ in range(3)]
    assert same(first, second)
    assert not np.array_equal(first[0][0], first[0][1])
    one.close()
    other.close()
