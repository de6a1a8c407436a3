"""Variants of a recipe with costs of their own: which there are, which is chosen, and what measures them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from murmurate.cli.options import change
from murmurate.errors import Refusal, RunFailed
from murmurate.mapping import measure, rounds
from murmurate.mapping.candidates import Candidate, candidates, changes, runs_with_exchange
from murmurate.mapping.cost import predict
from murmurate.mapping.hosts import on_hosts
from murmurate.mapping.lines import Line
from murmurate.mapping.pilot import Pilot, pilot_run
from murmurate.mapping.primitives import PRIMITIVES, producers
from murmurate.mapping.profile import DeviceProfile, RecipeCosts, exchange_key, key, variant_key
from murmurate.mapping.search import search
from murmurate.mapping.variants import in_precision, placed_on_cpu, variants, variants_here
from murmurate.recipes import recipe
from murmurate.spec import Placement
from murmurate.strategies import strategy
from murmurate.training.run import Run

ON_CPU, ON_GPUS = Placement(), Placement(("cuda:0", "cuda:1"))


def flat(a: float) -> Line:
    return Line(a, 0.0, (a, 0.0), (a, 0.0), (1, 1024))


def costs(forward: float) -> RecipeCosts:
    """Of a batch whose forward pass alone takes time."""
    lines = {name: flat(forward if name == "forward" else 0.0) for name in PRIMITIVES}
    return RecipeCosts(lines, dict.fromkeys(PRIMITIVES, 1.0), 0.0, 1000)


def placed(run: Run, placement: Placement) -> Run:
    return dataclasses.replace(run, placement=placement)


def two_gpus(run: Run, **fields: Any) -> DeviceProfile:
    """A host whose GPUs take a quarter of the time of its two cores for ``run``."""
    profile = DeviceProfile(2, hardware={"gpus": ["one", "another"]}, **fields)
    profile.recipes = {key(placed(run, ON_CPU)): costs(4e-3), key(placed(run, ON_GPUS)): costs(1e-3)}
    return profile


@pytest.mark.parametrize(("gpus", "count"), [(0, 2), (1, 4), (2, 4)])
def test_a_replay_of_images_may_be_on_a_gpu(gpus: int, count: int) -> None:
    run = recipe("pong-dqn")
    found = variants(run, 2, gpus)
    assert found[0] == run
    assert len({key(each) for each in found}) == len(found) == count
    where = {(each.placement.devices, each.source.replay.images) for each in found}  # type: ignore[attr-defined]
    on_gpus = tuple(f"cuda:{i}" for i in range(gpus))
    assert where == {(("cpu",), "host"), *([(on_gpus, "host"), (on_gpus, "device")] if gpus else [])}
    assert {each.placement.threads for each in found} == {1, 2}
    for each in found:
        assert change(run, changes(run, each), "") == each


def test_each_placement_has_each_precision_that_a_learner_offers() -> None:
    run = recipe("hopper-td3")
    found = variants(run, 8, 1)
    assert len(found) == 6
    assert {(each.placement.devices[0], each.placement.threads) for each in found} == {
        ("cpu", 1), ("cpu", 8), ("cuda:0", 1)
    }  # fmt: skip
    assert variants(run, 1, 0)[0] == run
    assert len(variants(run, 1, 0)) == 2, "one core, one thread"


def test_a_plan_for_a_gpu_also_considers_the_cpu() -> None:
    run = placed(recipe("cartpole-a2c"), ON_GPUS)
    found = dict.fromkeys(each.placement for each in variants(run, 2, 2))
    assert list(found) == [ON_GPUS, ON_CPU, Placement(threads=2)]


def test_the_faster_device_is_chosen_and_the_command_names_it() -> None:
    run = recipe("cartpole-a2c")
    best, *others = search(run, two_gpus(run))
    assert best.changes[:3] == ["--placement.devices", "cuda:0", "cuda:1"]
    assert change(run, best.changes, "") == best.run
    assert any(each.run.placement == ON_CPU for each in others)


def test_the_energy_of_a_gpu_is_not_predicted() -> None:
    run = recipe("cartpole-a2c")
    profile = two_gpus(run, watts=6.0)
    assert {each.run.placement for each in search(run, profile, "energy")} == {ON_CPU}
    with pytest.raises(Refusal, match="power of a GPU is unknown"):
        search(placed(run, ON_GPUS), profile, "energy")


def test_hosts_with_gpus_are_simulated_where_there_are_none() -> None:
    run = placed(recipe("cartpole-a2c"), ON_GPUS)
    profile = two_gpus(run)
    one = Candidate("", run, 0.0, "", "", predict(run, profile))
    [*found] = on_hosts([one], run, profile, 2, lambda line: None)
    assert {whole.placement for _, whole, _ in found} == {ON_GPUS}


def test_what_needs_shared_memory_has_no_candidates_on_a_gpu() -> None:
    run = dataclasses.replace(recipe("cartpole-a2c"), strategy=strategy("hogwild")(), replicas=2)
    found = list(candidates(run, 2, variants=[run, placed(run, ON_GPUS)]))
    on_gpus = {each.strategy.name for each in found if each.placement == ON_GPUS}
    assert "all-reduce" in on_gpus
    assert "hogwild" not in on_gpus
    assert any(each.strategy.name == "hogwild" and each.replicas == 2 for each in found)


def test_a_gpu_has_as_many_learners_as_were_measured_at_once() -> None:
    run = placed(recipe("cartpole-a2c"), Placement(("cuda:0",)))
    found = list(candidates(run, 16))
    pilots = rounds.Measured.prepare(run, 16)
    assert max(each.replicas for each in found) == pilots.busy.processes == 4
    assert pilots.crowded.processes == 8


def test_a_pilot_has_few_images_on_a_gpu() -> None:
    """The memory for all is taken at once, by each of several pilots."""
    run = next(each for each in variants(recipe("pong-dqn"), 2, 1) if each.source.replay.images == "device")  # type: ignore[attr-defined]
    assert pilot_run(run).source.replay.capacity == 50_000  # type: ignore[attr-defined]
    assert pilot_run(recipe("pong-dqn")).source.replay.capacity == 1_000_000  # type: ignore[attr-defined]


def test_actors_cost_what_they_do_on_the_cpu() -> None:
    run = placed(recipe("cartpole-impala"), Placement(("cuda:0",)))
    source: Any = run.source
    run = dataclasses.replace(run, source=dataclasses.replace(source, actors=1))
    profile = DeviceProfile(4, recipes={key(run): costs(1e-3)})
    profile.recipes[key(run)].lines["act"] = flat(1.0)
    assert predict(run, profile).bottleneck == "actors"
    profile.recipes[key(placed_on_cpu(run))] = costs(4e-3)
    assert predict(run, profile).bottleneck == "learner"


def test_processes_of_several_threads_do_not_share_cores() -> None:
    """Actors have one thread, wherever the learner computes."""
    run = recipe("cartpole-impala")
    found = list(candidates(run, 4, variants=[run, placed(run, Placement(threads=4))]))
    several = [each for each in found if each.placement.threads > 1]
    assert several
    assert all((each.replicas, producers(each)) == (1, 0) for each in several)
    halves = list(candidates(run, 4, variants=[placed(run, Placement(threads=2))]))[1:]
    assert {(each.replicas, producers(each)) for each in halves} == {(1, 0), (1, 1), (1, 2), (2, 0)}


def test_exchanges_are_measured_for_as_many_replicas_as_one_thread_each_allows() -> None:
    run = placed(recipe("cartpole-a2c"), Placement(threads=2))
    assert {each.replicas for each in runs_with_exchange(run, 2)} == {2}


def test_with_one_core_and_several_threads_a_process_is_alone() -> None:
    run = placed(recipe("cartpole-a2c"), Placement(threads=2))
    assert {pilot.processes for pilot in rounds.Measured.prepare(run, 1).pilots} == {1}


@pytest.mark.parametrize("cores", [1, 2, 12])
def test_no_candidate_comes_twice(cores: int) -> None:
    run = recipe("cartpole-apex-dqn")
    source: Any = run.source
    run = dataclasses.replace(run, source=dataclasses.replace(source, simulators=1))
    found = [repr(each) for each in candidates(run, cores, variants=variants(run, cores, 1))]
    assert len(set(found)) == len(found)


def test_replicas_whose_threads_are_more_than_the_cores_take_turns() -> None:
    run = placed(recipe("cartpole-a2c"), Placement(threads=2))
    profile = DeviceProfile(2, recipes={key(run): costs(1e-2)})
    two = dataclasses.replace(run, replicas=2)
    profile.exchange[exchange_key(two.strategy, 2)] = flat(0.0)
    alone, both = predict(run, profile), predict(two, profile)
    assert both.env_steps_per_second == pytest.approx(alone.env_steps_per_second)
    assert (alone.busy, both.busy) == (2, 2)


def counted(seconds: float) -> Pilot:
    return Pilot(8, 64, dict.fromkeys(PRIMITIVES, [1e-3] * 4), [seconds] * 4, 1e-3)


@pytest.mark.parametrize(("several", "known"), [(0.6e-2, True), (0.99e-2, False), (1.4e-2, False)])
def test_threads_are_measured_where_they_make_the_largest_pilot_faster(
    several: float, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def found(run: Run, seconds: float, processes: int) -> Pilot:
        asked.append(run.placement.threads)
        return counted(1e-2 if run.placement.threads == 1 else several)

    monkeypatch.setattr(rounds, "measure", found)
    monkeypatch.setattr(measure, "busy_elsewhere", lambda: 0.0)
    run, profile, saved = recipe("cartpole-a2c"), DeviceProfile(2), list[int]()
    assert measure.add_variants(profile, run, print, keep=lambda: saved.append(len(profile.left_out)))
    threads = [each for each in variants_here(run, 2) if each.placement.threads == 2]
    assert {key(each) in profile.recipes for each in threads} == {known}
    assert profile.left_out == ([] if known else sorted(map(variant_key, threads)))
    assert saved[-1] == len(profile.left_out)
    asked.clear()
    assert not measure.add_variants(profile, run, print)
    assert not asked, "it is remembered"
    source: Any = run.source
    larger = dataclasses.replace(run, source=dataclasses.replace(source, simulators=64))
    assert measure.add_variants(profile, larger, print) != known, "for these sizes alone"
    several = 0.5e-2
    assert measure.add_variants(profile, run, print, again=True)
    assert not {*map(variant_key, threads)} & {*profile.left_out}
    assert {key(each) for each in threads} <= {*profile.recipes}
    several = 2e-2
    assert measure.add_variants(profile, run, print, again=True)
    assert not {key(each) for each in threads} & {*profile.recipes}, (
        "costs of the measurement before are gone"
    )


def test_a_variant_that_fails_is_left_out_and_the_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Placement(threads=2)

    def found(run: Run, seconds: float, processes: int) -> Pilot:
        if run.placement == broken:
            raise RunFailed("Traceback\n  in a pilot\nRuntimeError: out of memory\n")
        return counted(1e-2)

    monkeypatch.setattr(rounds, "measure", found)
    monkeypatch.setattr(measure, "_threads_pay", lambda *_: True)
    run, profile, said = recipe("cartpole-a2c"), DeviceProfile(2), list[str]()
    assert measure.add_variants(profile, run, said.append)
    assert set(profile.recipes) == {key(each) for each in variants_here(run, 2) if each.placement != broken}
    assert "left out: cartpole-a2c --placement.threads 2: RuntimeError: out of memory" in said
    said.clear()
    assert not measure.add_variants(profile, run, said.append), "it is remembered"
    with pytest.raises(RunFailed):
        measure.add_variants(profile, placed(run, broken), said.append, again=True)


def test_a_variant_whose_actors_fail_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = recipe("cartpole-impala"), list[str]()
    bfloat16 = in_precision(run, "bfloat16")
    assert bfloat16 is not None

    def handovers(profile: DeviceProfile, each: Run, log: Any) -> tuple[float, float]:
        if each == bfloat16:
            raise RunFailed("too slow")
        return 0.0, 0.0

    monkeypatch.setattr(rounds, "measure", lambda *_: counted(1e-2))
    monkeypatch.setattr(measure, "_handovers", handovers)
    monkeypatch.setattr(measure, "variants_here", lambda *_: [run, bfloat16])
    profile = DeviceProfile(2)
    assert measure.add_variants(profile, run, said.append)
    assert (set(profile.recipes), profile.left_out) == ({key(run)}, [variant_key(bfloat16)])
    assert "left out: cartpole-impala --agent.precision bfloat16: too slow" in said


def test_no_other_process_is_measured_beside_one_that_takes_all_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def found(run: Run, seconds: float, processes: int) -> Pilot:
        asked.append(processes)
        return counted(1e-2)

    monkeypatch.setattr(rounds, "measure", found)
    for threads, most in ((1, 8), (2, 4), (4, 1)):
        run = placed(recipe("cartpole-a2c"), Placement(threads=threads))
        list(rounds.in_rounds({"it": run}, run, 4, print))
        assert max(asked) == most
        asked.clear()
