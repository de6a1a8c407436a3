"""Benches at sizes of no use but for testing: they run to their ends and return what their tables show."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from murmurate.bench import (
    _cache,
    benches,
    cartpole_learning,
    every_strategy,
    fpga_learner,
    mapping_table,
    plan_target,
    spo_scaling,
    transport,
    value_learning,
)
from murmurate.bench._result import Log, progress_log
from murmurate.cli.main import main
from murmurate.cli.options import change, options
from murmurate.errors import Refusal
from murmurate.fabric.simulated.fabric import SimulatedFabric
from murmurate.fpga.learner import EmulatedLearner
from murmurate.mapping import rounds
from murmurate.ranges import check_number
from murmurate.record.runs import RecordedRun

SILENT = progress_log()
BENCHES = benches()


def only(*strategies: str) -> Callable[[], tuple[str, ...]]:
    return lambda: strategies


@pytest.mark.parametrize(
    "agent", ["dqn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dqn-images", "td3"))]
)
def test_spo_scaling_predicts_every_case(agent: Literal["dqn", "td3", "dqn-images"]) -> None:
    plan = spo_scaling.SPOScalingPlan(
        agent, batch=16, hidden=8, learners=(1, 2), periods=(1, 5), rounds=2, turns=1
    )
    result = spo_scaling.measure(plan, SILENT)
    assert [(row["learners"], row["period"]) for row in result["rows"]] == [(1, 1), (2, 1), (2, 5)]
    for row in result["rows"]:
        assert row["predicted_seconds"] > 0 < row["predicted_to_measured"]
        assert row["update_seconds"]["repetitions"] == 2
        assert row["parallel_apex_scaling_factor"] > 0 < row["parts"]["backward"]
    errors = [abs(row["predicted_to_measured"] - 1) for row in result["rows"]]
    assert result["worst_error"] == max(errors)
    json.dumps(result)


def test_spo_scaling_draws_batches_that_are_larger_than_the_usual_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Zhang's of 4,096 images."""
    spec, _ = spo_scaling._CASES["dqn"]
    monkeypatch.setitem(spo_scaling._CASES, "dqn", (spec, 8))
    plan = spo_scaling.SPOScalingPlan(hidden=8)

    def draw(member: Any) -> None:
        spo_scaling._update(*spo_scaling._learner(member, 1, 16, plan), 16)

    SimulatedFabric(1, 0).run([draw])


def test_spo_scaling_refuses_learners_that_cannot_share_a_batch() -> None:
    with pytest.raises(Refusal, match=r"3 learners cannot share a batch of 256 equally. Use --batch 258"):
        spo_scaling.measure(spo_scaling.SPOScalingPlan(learners=(1, 3)), SILENT)


def test_mapping_table_fills_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: (spec, config, (8, 32)) for name, (spec, config, _) in mapping_table._CASES.items()}
    monkeypatch.setattr(mapping_table, "_CASES", few)
    result = mapping_table.measure(mapping_table.MappingTablePlan(leaves=4096, repetitions=1), SILENT)
    assert [(cell["environment"], cell["batch"]) for cell in result["cells"]] == [
        (name, batch) for name in few for batch in (8, 32)
    ]
    for cell in result["cells"]:
        assert cell["learner"] == ("fpga" if cell["environment"] == "CartPole" else "cpu")
        assert cell["steps_per_second"] == max([cell["steps_per_second"], *cell["others"].values()])
    assert set(result["no_fpga_learner"]) == {f"{name}, {b}" for name in ("Hopper", "Pong") for b in (8, 32)}
    json.dumps(result)


def test_transport_compares_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setattr(transport, "_STREAM_MEGABYTES", 2)
    result = transport.measure(transport.TransportPlan(sizes=((1, 3, 1),)), SILENT)
    ways = result["sizes"]["1_MB"]["ways"]
    assert {"gloo", "gloo_mean", "memcpy", "shared_memory_register", "tcp_plain_mean"} <= set(ways)
    encrypted = {label.partition("_")[0] for label in result["worst"] if label.endswith("_over_cipher")}
    assert encrypted == {"tcp"}  # in shared memory nothing is encrypted
    assert all(way["milliseconds"]["least"] > 0 for way in ways.values())
    assert all(ratio > 0 for ratio in result["worst"].values())
    json.dumps(result)


def test_fpga_learner_trains_and_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("amaranth")
    made: list[tuple[Any, list[Any]]] = []

    def learner(*arguments: Any, **options: Any) -> Any:
        found = EmulatedLearner(*arguments, **options)
        made.append((found, [master.clone() for master in found.masters]))
        return found

    monkeypatch.setattr(fpga_learner, "EmulatedLearner", learner)
    monkeypatch.setattr(fpga_learner, "_LEARNING_STARTS", 100)
    plan = fpga_learner.FpgaLearnerPlan(seeds=2, env_steps=200, episodes=1, hardware_steps=2)
    result = fpga_learner.measure(plan, SILENT)
    json.dumps(result)
    trained, before = made[0]
    assert all(not old.equal(new) for old, new in zip(before, trained.masters, strict=True))
    assert trained.saturations["forward"].numbers == 101 * 64 * (8 + 8 + 2)
    cycles = result["modelled"]["cycles"]
    assert [run["hardware"]["cycles"] for run in result["runs"]] == [[cycles, cycles], []]
    assert result["runs"][0]["hardware"]["mismatches"] == 0
    assert result["modelled"]["clock_provenance"] == "assumed"  # the design was not placed


def trained_here(words: Sequence[str]) -> None:
    """In place of ``run_murmurate``, whose process would import torch anew and start one for each member."""
    assert main([*words, "--launcher", "inline"]) == 0


def test_cartpole_learning_counts_who_reached_the_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache, "run_murmurate", trained_here)
    monkeypatch.setattr(cartpole_learning, "strategies", only("solo"))
    plan = cartpole_learning.CartPoleLearningPlan(env_steps=400)
    result = cartpole_learning.measure(plan, SILENT)
    assert result["reached"] == {"solo": 0}
    assert result["replicas"] == {"solo": 1}
    assert result["env_steps"]["solo"]["median"] >= 400


@pytest.mark.parametrize("pong_seconds", [0.0, pytest.param(15.0, marks=pytest.mark.slow)])
def test_every_strategy_makes_a_row_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pong_seconds: float
) -> None:
    if pong_seconds:
        pytest.importorskip("ale_py")
    monkeypatch.setattr(every_strategy, "strategies", only("gala"))
    plan = every_strategy.EveryStrategyPlan((1,), 1, 400, pong_seconds, str(tmp_path))
    [row] = every_strategy.measure(plan, SILENT)["rows"]
    assert (row["strategy"], row["replicas"]) == ("gala", 1)
    assert row["cartpole_eval_return"]["median"] > 0
    assert not pong_seconds or row["pong_env_steps_per_second"] > 0


def test_value_learning_repeats_each_agent_by_its_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shorter(folder: Path, recipe: str, options: Sequence[str], log: Log) -> RecordedRun:
        return _cache.cached_run(folder, recipe, (*options, "--env-steps", "1100"), log)

    monkeypatch.setattr(_cache, "run_murmurate", trained_here)
    monkeypatch.setattr(value_learning, "cached_run", shorter)
    plan = value_learning.ValueLearningPlan((("dqn", 1),), depths=(), where=str(tmp_path))
    result = value_learning.measure(plan, SILENT)
    assert result["recipes"]["cartpole-dqn"]["env_steps"]["median"] >= 1100
    assert result["recipes"]["cartpole-dqn"]["seeds"] == 1
    assert result["all_reached"] is False


@pytest.mark.slow
def test_plan_target_compares_choice_recipe_and_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "_SECONDS", 0.3)
    plan = plan_target.PlanTargetPlan(("cartpole-a2c",), (15.0,), 2, 1, 1, str(tmp_path / "rows"))
    result = plan_target.measure(plan, SILENT)
    [row] = result["rows"]
    assert {"as the recipe is", row["choice"], row["best"]} == set(row["missed"])
    assert row["default_over_choice"] == result["least_default_over_choice"] > 0
    assert row["choice_over_best"] == result["greatest_choice_over_best"] > 0
    monkeypatch.setattr(plan_target, "_row", lambda *_: pytest.fail("measured again"))
    assert plan_target.measure(plan, SILENT) == result
    json.dumps(result)


@pytest.mark.parametrize(("recipes", "targets"), [(("cartpole-a2c",), ()), ((), (300.0,))])
def test_each_recipe_needs_a_target(recipes: tuple[str, ...], targets: tuple[float, ...]) -> None:
    with pytest.raises(Refusal, match="Give each recipe one"):
        plan_target.measure(plan_target.PlanTargetPlan(recipes, targets), SILENT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn-throughput", "cartpole-throughput"])
def test_races_with_windows_too_short_to_mean_much(name: str) -> None:
    pytest.importorskip("ale_py")
    plan = dataclasses.replace(BENCHES[name].QUICK, rounds=1, window_cpu_seconds=0.5)
    result: dict[str, Any] = BENCHES[name].measure(plan, SILENT)
    assert result["env_steps_per_cpu_second"] > 0
    json.dumps(result)


@pytest.mark.parametrize("name", BENCHES)
def test_fields_of_plans_have_help_and_numbers_ranges_that_their_own_are_in(name: str) -> None:
    for plan in (BENCHES[name].QUICK, BENCHES[name].FULL):
        for option in options(plan):
            assert option.about, option.name
            assert all(kind.annotated for kind in option.numbers), option.name
            check_number(option.name, option.value, option.numbers)


def test_items_of_several_parts_are_read_and_checked() -> None:
    plan = change(BENCHES["value-learning"].QUICK, ["--recipes", "gym:CartPole-v1-dqn:2", "fqi:1"], "bench")
    assert plan.recipes == (("gym:CartPole-v1-dqn", 2), ("fqi", 1))
    for words in (["20:10"], ["20,10"], ["20", "10"]):
        assert change(BENCHES["topics-speedup"].QUICK, ["--largest", *words], "bench").largest == (20, 10)
    assert change(BENCHES["topics-speedup"].FULL, ["--largest", "none"], "bench").largest is None
    assert change(BENCHES["replay"].QUICK, ["--drift", "64,100"], "bench").drift == (64, 100)


@pytest.mark.parametrize(
    ("name", "words", "error"),
    [
        ("value-learning", ["--recipes", "dqn"], r"takes name:integer,\.\.\., not 'dqn'.*--recipes dqn:1,"),
        ("replay", ["--drift", "3"], r"takes integer:integer, not '3'; .* --drift 131072,2000000"),
        ("topics-speedup", ["--largest", "3"], r"takes integer:integer or none.*--largest 20:10"),
        ("transport", ["--sizes", "1:0:1"], r"--sizes is 0; it must be at least 1"),
        ("straggler", ["--replicas", "1"], r"--replicas is 1; it must be at least 2"),
        ("straggler-simulated", ["--replicas", "1"], r"--replicas is 1; it must be at least 2"),
        ("topics-speedup", ["--measured-updates", "1"], r"--measured-updates is 1; it must be at least 2"),
        ("plan", ["--placements", "0"], r"--placements is 0; it must be at least 1"),
    ],
)
def test_items_that_do_not_fit_are_refused(name: str, words: list[str], error: str) -> None:
    with pytest.raises(Refusal, match=error):
        change(BENCHES[name].QUICK, words, "bench")
