"""The event files, read back byte by byte with a reader that shares nothing with the writer."""

import math
import struct
from contextlib import closing
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event

from murmurate.record.tensorboard import GROUPS, TensorBoard


def read_events(folder: Path) -> list[Event]:
    """TFRecord framing: uint64 length, uint32 checksum, payload, uint32 checksum."""
    events = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            events.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 12 + length + 4
    return events


def points(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """(step, value, wall time) by tag."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for event in read_events(folder):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, []).append((event.step, value.simple_value, event.wall_time))
    return found


def record(t: float, replica: int, steps: int, **fields):
    return {"time_seconds": t, "replica": replica, "env_steps": steps, "updates": steps // 80, **fields}


def test_one_writer_a_replica(tmp_path: Path) -> None:
    with closing(TensorBoard(tmp_path, started_at_unix=1_000_000.0)) as run_state:
        run_state.feed([record(2.5, 0, 80, loss=0.5, return_mean=-21.0), record(2.75, 1, 160, loss=0.25)])
        run_state.feed([record(5.0, 0, 240, loss=0.125, episode_returns=[[3.0, 10], [5.0, 30], [None, 50]])])
    first, second = points(tmp_path / "replica-0"), points(tmp_path / "replica-1")
    assert first["learning/loss"] == [(80, 0.5, 1_000_002.5), (240, 0.125, 1_000_005.0)]
    assert first["return/return_mean"] == [(80, -21.0, 1_000_002.5)]
    assert first["return/episode_return"] == [(240, 4.0, 1_000_005.0)]
    assert first["return/episode_length"] == [(240, 30.0, 1_000_005.0)]
    assert second["learning/loss"] == [(160, 0.25, 1_000_002.75)]
    assert "return/return_mean" not in second


def test_the_step_is_that_of_all_replicas_as_in_evaluations(tmp_path: Path) -> None:
    with closing(TensorBoard(tmp_path, 0.0)) as run_state:
        run_state.feed([record(1.0, 1, 80, total_env_steps=320, kl=0.5, temperature=0.25)])
        run_state.feed([record(1.0, None, 320, kind="evaluation", eval_return_mean=9.5)])
    assert points(tmp_path / "replica-1") == {
        "learning/kl": [(320, 0.5, 1.0)],
        "learning/temperature": [(320, 0.25, 1.0)],
        "other/updates": [(320, 1.0, 1.0)],
    }
    assert points(tmp_path / "launcher")["evaluation/eval_return_mean"] == [(320, 9.5, 1.0)]


def test_lists_nulls_and_what_is_not_finite(tmp_path: Path) -> None:
    with closing(TensorBoard(tmp_path, 0.0)) as run_state:
        run_state.feed([record(1.0, 0, 80, gradient_cosine=[1.0, None, 0.5], value_loss=None)])
        run_state.feed([record(2.0, 0, 160, loss=None, not_finite=["loss"])])
    found = points(tmp_path / "replica-0")
    assert found["agreement/gradient_cosine/0"][0][1] == 1.0
    assert found["agreement/gradient_cosine/2"][0][1] == 0.5
    assert "agreement/gradient_cosine/1" not in found
    assert "learning/value_loss" not in found
    assert math.isnan(found["learning/loss"][0][1])


def test_events_are_text_of_the_launcher(tmp_path: Path) -> None:
    event = {"time_seconds": 3.0, "kind": "event", "event": "died", "message": "replica 2 died"}
    with closing(TensorBoard(tmp_path, 0.0)) as run_state:
        run_state.feed([{**event, "replica": None, "env_steps": 0, "updates": 0}])
    texts = [
        value.tensor.string_val[0].decode()
        for e in read_events(tmp_path / "launcher")
        for value in e.summary.value
    ]
    assert texts == ["replica 2 died"]


def test_evaluations_are_points_of_the_launcher(tmp_path: Path) -> None:
    found = {"kind": "evaluation", "eval_return_mean": 9.5, "returns": [9.0, 10.0], "message": "at 80"}
    with closing(TensorBoard(tmp_path, 1_000.0)) as run_state:
        run_state.feed([record(1.0, None, 80, **found)])
    assert points(tmp_path / "launcher") == {"evaluation/eval_return_mean": [(80, 9.5, 1_001.0)]}


def test_a_second_start_leaves_no_point_of_the_lost_future(tmp_path: Path) -> None:
    with closing(TensorBoard(tmp_path, 0.0)) as run_state:
        run_state.feed([record(1.0, 0, 80, loss=1.0), record(2.0, 0, 160, loss=9.0)])
    (tmp_path / "mine.txt").write_text("kept")
    with closing(TensorBoard(tmp_path, 0.0)) as run_state:
        run_state.feed([record(1.0, 0, 80, loss=1.0), record(2.5, 0, 160, loss=2.0)])
    assert points(tmp_path / "replica-0")["learning/loss"] == [(80, 1.0, 1.0), (160, 2.0, 2.5)]
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_every_grouped_field_is_explained() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    made_here = {"episode_return", "episode_length"}  # from episode_returns
    missing = [key for keys in GROUPS.values() for key in keys if f"`{key}`" not in text]
    assert set(missing) <= made_here
