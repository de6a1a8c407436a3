"""Benches whose members are real processes, at sizes of no use but for testing."""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from murmurate.bench import (
    _gpu,
    _peers,
    _roles,
    all_reduce_vs_ddp,
    atari_throughput,
    bench,
    benches,
    replay_shared,
    strategy_cost,
)
from murmurate.bench._result import progress_log
from murmurate.cli.listing import listing
from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Fabric
from murmurate.launch import together


def meet(fabric: Fabric, offset: float) -> float:
    x = torch.full((4,), fabric.rank + offset)
    fabric.channel("x", x).mean_(x)
    return float(x[0])


def fail_on_one(fabric: Fabric) -> None:
    if fabric.rank == 1:
        raise ValueError("rank one is unwell")


def compare_with_ddp(fabric: Fabric, store: str) -> float:
    """Largest difference of a parameter after 3 updates by either side, from equal starts."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=fabric.rank, world_size=2)
    frames = torch.randint(
        0, 256, (4, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(fabric.rank)
    )
    ours, theirs = all_reduce_vs_ddp.net(), all_reduce_vs_ddp.net()
    start = [p.detach().clone() for p in theirs.parameters()]
    updates = (all_reduce_vs_ddp.ours(fabric, ours, frames), all_reduce_vs_ddp.ddp(theirs, frames))
    for update in updates:
        for _ in range(3):
            update()
    dist.barrier()
    moved = max(float((p - s).abs().max()) for p, s in zip(theirs.parameters(), start, strict=True))
    apart = max(
        float((p - q).abs().max()) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    return apart / moved


def test_members_work_together_and_answer_by_rank() -> None:
    assert _roles.run_together(3, meet, 10.0) == [11.0, 11.0, 11.0]
    assert multiprocessing.active_children() == []


def test_what_a_measurement_lasts_does_not_count_against_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(together, "_DEADLINE_SECONDS", -1000.0)
    assert _roles.run_together(1, meet, 10.0, seconds=2000.0) == [10.0]
    with pytest.raises(RunFailed, match="member 0 did not answer within -900 s"):
        _roles.run_together(1, meet, 10.0, seconds=100.0)


def test_updates_may_take_as_long_as_the_machine_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``bench spo-scaling --agent dqn-images --batch 4096``, whose rounds take many minutes."""
    monkeypatch.setattr(together, "_DEADLINE_SECONDS", -600.0)
    assert _roles.run_together(1, meet, 10.0) == [10.0]


def test_a_failing_member_is_named_with_its_reason_and_nobody_is_left() -> None:
    with pytest.raises(RunFailed, match=r"(?s)member 1 .*rank one is unwell"):
        _roles.run_together(2, fail_on_one)
    assert multiprocessing.active_children() == []


def test_both_sides_of_the_ddp_bench_train_alike(tmp_path: Path) -> None:
    answers = _roles.run_together(2, compare_with_ddp, str(tmp_path / "store"))
    assert max(answers) < 1e-3


@pytest.mark.parametrize("name", ["gala", "all-reduce", "local-sgd", "hogwild"])
def test_each_strategy_can_be_weighed(name: str) -> None:
    answers = _roles.run_together(2, strategy_cost.work, name, 1000, 12)
    for answer in answers:
        assert {k: len(v) for k, v in answer["times"].items()} == {"copy": 12, "update": 12, "step": 12}
    figures = strategy_cost.figures(answers)
    heard = figures["share_of_steps_that_heard_others"]
    if name != "gala":  # whose members hear of one another as chance has it
        # 22 steps, the first 10 of them uncounted: local SGD's means after 20 fall into the counted ones
        assert heard == {"all-reduce": 1.0, "local-sgd": 1 / 12, "hogwild": 1.0}[name]


def test_every_bench_is_listed_with_a_sentence() -> None:
    rows = {row["name"]: row["summary"] for row in listing("benches")}
    assert {"atari-throughput", "cartpole-throughput", "strategy-cost", "all-reduce-vs-ddp"} <= set(rows)
    assert all(rows.values())
    assert list(rows) == list(benches())


def test_an_unknown_bench_is_refused_with_the_nearest() -> None:
    with pytest.raises(Refusal, match="Did you mean 'atari-throughput'"):
        bench("atari-troughput")


def test_a_result_carries_what_every_figure_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = benches()["strategy-cost"]
    monkeypatch.setattr(module, "measure", lambda plan, log: {"full_seen": plan is module.FULL})
    result = bench("strategy-cost", full=True, table=False)
    assert result["command"] == "murmurate bench strategy-cost --json --full"
    assert result["full_seen"] is True
    assert result["plan"]["turns"] == module.FULL.turns
    assert result["hardware"]["cores"] >= 1
    assert {"torch", "python", "murmurate", "ale-py", "stable-baselines3"} <= set(result["versions"])
    assert result["date"][:2] == "20"


@pytest.mark.slow
def test_the_race_on_pong_with_windows_too_short_to_mean_much() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("stable_baselines3")
    plan = atari_throughput.AtariThroughputPlan(
        rounds=1, window_cpu_seconds=0.5, side_rounds=1, limit_windows_a_round=1
    )
    result = atari_throughput.measure(plan, progress_log())
    assert set(result["windows"]) == {"float32", "bfloat16", "gossip", "buffered", "sb3"}
    assert 0.1 < result["ratio_limit_float32"] < 3
    assert 0.3 < result["ratio_sb3_a2c"] < 10
    assert 0.2 < result["per_learner_share_with_2_gossiping"] < 3
    assert result["limit_float32"] < result["limit_bfloat16"] * 2
    json.dumps(result)


def fake_peer(home: Path, name: str, code: str) -> None:
    (home / name / ".venv" / "bin").mkdir(parents=True)
    os.symlink(sys.executable, home / name / ".venv" / "bin" / "python")
    (home / name / "run.py").write_text(code)


def test_peers_run_report_their_failure_or_say_that_they_are_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MURMURATE_PEERS", str(tmp_path))
    silent = progress_log()
    absent = _peers.entries(True, silent)
    assert [entry["peer"] for entry in absent] == list(_peers.PEERS)
    assert all("not installed" in entry["status"] for entry in absent)
    fake_peer(tmp_path, "cleanrl", "print('hello'); print('{\"env_steps\": 900, \"cpu_seconds\": 3.0}')")
    fake_peer(tmp_path, "sample-factory", "raise SystemExit('no such game')")
    assert all("--full" in entry["status"] for entry in _peers.entries(False, silent))
    ran: dict[str, Any] = {entry["peer"]: entry for entry in _peers.entries(True, silent)}
    assert ran["cleanrl"]["env_steps_per_cpu_second"] == 300.0
    assert ran["sample-factory"]["status"] == "failed: no such game"


@pytest.mark.parametrize(
    ("line", "sample"),
    [("37, 71.20\n", (37.0, 71.2)), ("[N/A], [N/A]\n", None), ("", None), ("12\n", None)],
)
def test_what_nvidia_smi_prints(line: str, sample: tuple[float, float] | None) -> None:
    assert _gpu.parse(line) == sample


def test_learners_that_actors_feed_lose_nothing() -> None:
    plan = replay_shared.SharedReplayPlan(
        seconds=0.5, repetitions=1, actors=2, simulators=4, capacity=4_096, filled=256
    )
    result = replay_shared.measure(plan, lambda words: None)
    assert result["lost_records"] == 0
    assert set(result["share_of_alone"]) == {"2 apart", "1 learner", "2 learners"}
    for of in result["cases"].values():
        assert of["draws_per_second"]["median"] > 0
        # each row is drawn eight times
        ratio = of["draws_per_second"]["median"] / of["inserts_per_second"]["median"]
        assert ratio == pytest.approx(8.0, rel=0.2)


def test_a_replay_that_no_batch_fits_in_is_refused() -> None:
    plan = replay_shared.SharedReplayPlan(capacity=100, batch=256)
    with pytest.raises(Refusal, match="--capacity 256 at least"):
        replay_shared.measure(plan, lambda words: None)
