"""``murmurate plan``: which configuration of a recipe is best on a machine, from measured costs."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from murmurate.cli.help import Fields
from murmurate.cli.options import given, number_argument, option
from murmurate.cli.plan_checks import check_apply, check_link, check_options, check_outputs
from murmurate.cli.run_verbs import changed, recipe_run, report_end, train_fields
from murmurate.cli.sweep import imported
from murmurate.errors import Refusal, RunFailed, cause_of, quoted
from murmurate.ranges import AnyFloat, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from murmurate.mapping.candidates import Candidate
    from murmurate.mapping.profile import DeviceProfile
    from murmurate.mapping.search import Objective
    from murmurate.strategies.interface import Strategy
    from murmurate.training.run import Run

PROFILE = Path("runs") / "profile.json"
_MOST_SHOWN, _MOST_CHECKED = 5, 3
_FAR_OFF = 1.5  # --check reports a prediction that is off by a greater factor


def add_verb(verbs: Any) -> None:
    plan = verbs.add_parser(
        "plan",
        help="predict the best replicas, strategy, simulators, actors and batch for a machine",
        description="Measures what the parts of a recipe cost on this machine, and predicts which "
        "configuration of it is best. Options of the recipe, as of train, may follow.",
    )
    plan.add_argument("recipe", help="<world>-<algorithm>; see: murmurate list recipes")
    plan.add_argument("--strategy", help="how the replicas agree; see: murmurate list strategies")
    plan.add_argument(
        "--strategies",
        metavar="NAME[:PERIOD],...",
        help="strategies to compare, each with H, tau or B (default: all-reduce,local-sgd,gala)",
    )
    plan.add_argument("--profile", action="store_true", help="measure the costs, even if they are known")
    plan.add_argument(
        "--on", type=Path, help=f"profile of a machine, perhaps another one (default: {PROFILE})"
    )
    plan.add_argument(
        "--objective",
        choices=("throughput", "time", "energy", "memory"),
        help="default: throughput, or time with --target; memory: the least with which no speed is lost",
    )
    plan.add_argument(
        "--target",
        type=number_argument(AnyFloat),
        help="return to reach with --objective time; trains short runs",
    )
    plan.add_argument("--watts", type=number_argument(PositiveFloat), help="power of a busy core")
    option(plan, "--hosts", number_argument(PositiveInt), 1, "number of equal hosts")
    plan.add_argument("--link", action="store_true", help="measure the network between two hosts")
    plan.add_argument("--check", action="store_true", help="run the best few configurations, and compare")
    plan.add_argument("--apply", action="store_true", help="train with the best configuration")
    plan.add_argument("--out", type=Path, help="run folder of --apply")
    plan.add_argument("--page", type=Path, help="write the plan as a web page")
    plan.add_argument("--json", action="store_true", help="candidates as a list, best first")
    plan.set_defaults(act=act, fields=_fields, passes=None)


def _fields(options: argparse.Namespace | None, rest: list[str]) -> Fields:
    return train_fields(options, rest, "plan")


def act(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.mapping.advice import advice
    from murmurate.mapping.assumed import assumption, check_cycles
    from murmurate.mapping.candidates import named_strategies, strategies_of
    from murmurate.mapping.learning import check_returns
    from murmurate.mapping.pilot import pilot_run
    from murmurate.mapping.search import search

    if options.link:
        check_link(options, rest)
        return _measure_link(options.on or PROFILE)
    check_options(options, rest)
    objective: Objective = options.objective or ("throughput" if options.target is None else "time")
    run = changed(recipe_run(options), options, rest, f"murmurate train {quoted(options.recipe)}")
    run.validate()
    pilot_run(run)  # refuses what is not modelled, before it is said that something is measured
    if options.apply:
        check_apply(run)
    check_cycles(run, options.hosts, options.check)
    if options.target is not None or objective == "time":
        check_returns(run)
    shorter, names = objective == "time", options.strategies
    strategies = strategies_of(run, shorter=shorter) if names is None else named_strategies(run, names)
    check_outputs(options, options.on or PROFILE)
    with _alone():
        profile = _profile(run, options, objective, strategies)
    if (assumed := assumption(run)) is not None:
        _say(assumed)
    candidates = search(run, profile, objective, options.hosts, _say, strategies)
    words = [_words(run, options.strategy, rest, each) for each in candidates]
    rates, failed = _measured_rates(candidates) if options.check else ({}, set())
    if options.page is not None:
        from murmurate.mapping.page import write_page

        _say(f"the page is {write_page(options.page, run, profile, candidates, rates)}")
    if len(failed) == len(candidates):
        raise RunFailed("Every configuration failed when it was run: the lines above say how.")
    best = first = next(each for each in candidates if each.name not in failed)
    if rates:
        _say(_verdict(candidates, rates, run.unit))
        if objective == "throughput":
            best = _fastest(candidates, rates)
    if options.json:
        rows = [
            each.plain()
            | {"changes": own, "measured": rates.get(each.name)}
            | {"advice": advice(each, profile, options.hosts)}
            for each, own in zip(candidates, words, strict=True)
        ]
        print(json.dumps(rows))
    else:
        _show(run, candidates, machine(profile.cores, options.hosts), rates)
        which = "the first" + " that did not fail" * (first is not candidates[0])
        if best is not first:
            which = "the fastest that was run"
        which += ", on each host" * (options.hosts > 1)
        print(f"Train with {which}: {command(run, best, words[candidates.index(best)], options.hosts)}")
        for sentence in advice(best, profile, options.hosts):
            print(sentence)
    return _apply(best, options) if options.apply else 0


def command(run: Run, best: Candidate, words: Sequence[str], hosts: int = 1) -> str:
    """The command that trains ``best``, whose options of ``train`` are ``words``. With several hosts it is
    given on each; HOST is the first one's name, and FOLDER one that all of them see."""
    if hosts == 1:
        return shlex.join(["murmurate", "train", run.recipe, *words])
    # torchrun's ranks are the replicas
    kept = _without(words, lambda word: word.partition("=")[0] in ("--replicas", "--launcher"))
    ranks = ["--nnodes", str(hosts), "--nproc-per-node", str(best.run.replicas // hosts)]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29400"]
    train = ["-m", "murmurate", "train", run.recipe, "--launcher", "torchrun", "--out", "FOLDER"]
    return shlex.join(["torchrun", *ranks, *meeting, *train, *kept])


def _words(run: Run, strategy: str | None, rest: Iterable[str], candidate: Candidate) -> list[str]:
    """The options of ``murmurate train`` that give the candidate: those given to ``plan``, without the
    strategy's if the candidate has another one, then its changes. Of an option that is given twice, the later
    value counts."""
    if "--strategy" not in candidate.changes:
        own = () if strategy is None else ("--strategy", strategy)
        return [*imported(), *own, *rest, *candidate.changes]

    def is_of_strategy(word: str) -> bool:
        [name] = given([word], run, "murmurate plan")
        return name.startswith("strategy.")

    return [*imported(), *_without(rest, is_of_strategy), *candidate.changes]


def _without(words: Iterable[str], is_left_out: Callable[[str], bool]) -> list[str]:
    """``words`` without the options that ``is_left_out``, and without their values."""
    kept: list[str] = []
    is_kept = True
    for word in words:
        if word.startswith("--"):
            is_kept = not is_left_out(word)
        kept += [word] * is_kept
    return kept


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _keep(profile: DeviceProfile, path: Path) -> None:
    """Write the profile. Raises Refusal if it cannot be written."""
    from murmurate.mapping.profile import save

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(profile, path)
    except OSError as error:
        raise Refusal(f"{path} cannot be written: {cause_of(error)}. Name another file with --on.") from error


def _measure_link(path: Path) -> int:
    """Measure the network between two hosts, of which this is one; the first keeps it in its profile."""
    from murmurate.mapping.link import measure, profile_with

    if (link := measure()) is not None:
        with _alone():
            _keep(profile_with(link, path), path)
        rate = f"{link.bytes_per_second / 1e9:.3g} GB/s"
        _say(f"network: {1e6 * link.latency_seconds:.0f} us + bytes / {rate}; the profile is {path}")
    return 0


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Meanwhile another plan in this working folder waits, if its file system has locks: it would keep its
    profile without what this one measures, and disturb the measurements."""
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            descriptor = os.open(".", os.O_RDONLY)
            opened.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say("waiting for another plan, which measures in this folder")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _profile(
    run: Run, options: argparse.Namespace, objective: Objective, strategies: Sequence[Strategy]
) -> DeviceProfile:
    """The profile of ``--on``, or this machine's, with the costs that a plan of these strategies needs; what
    is measured is saved at once.

    Raises Refusal if the profile is of another machine and something would have to be measured or trained.
    """
    from murmurate.mapping import choice, exchange, learning, measure
    from murmurate.mapping.candidates import runs_with_exchange
    from murmurate.mapping.profile import DeviceProfile, key, load
    from murmurate.mapping.search import check_objective
    from murmurate.native.cores import usable_cores
    from murmurate.training.preflight import device_types

    path = options.on or PROFILE
    cores = usable_cores()
    is_new = not path.exists() and (options.profile or options.on is None)
    profile = DeviceProfile.here(cores, run.placement.devices[0]) if is_new else load(path)
    here = profile.is_here(cores)
    if not here and (options.profile or options.on is None):
        raise Refusal(
            f"{path} is of another machine ({profile.hardware.get('cpu')}, {profile.cores} cores), and what "
            "is measured here does not belong in it. Use --on with another file, or remove it."
        )
    if here:
        device_types(run)  # what is not there is refused; a pilot's process would end with a traceback
        for each in strategies:
            exchange.check(each)
    elif options.apply:
        raise Refusal(
            f"--apply trains here, and {path} is of another machine, with other cores. Give the command that "
            "is printed there, or leave out --on."
        )
    has_changed = options.watts not in (None, profile.watts)
    if has_changed:
        profile.watts = options.watts
        _keep(profile, path)
    if here and (objective != "time" or options.target is None):  # a target is measured below
        # before the costs are measured, which takes minutes
        check_objective(run, profile, objective, options.hosts)
    if is_new or (here and options.profile):  # before anything is measured, which could not be kept
        _keep(profile, path)
    if here:
        has_changed |= measure.add_variants(profile, run, _say, options.profile, lambda: _keep(profile, path))
        for exchanging_run in runs_with_exchange(run, cores, strategies):
            if measure.add_exchange(profile, exchanging_run, _say, options.profile):
                _keep(profile, path)
                has_changed = True
    if has_changed:
        _say(f"the profile is {path}")
    costs = profile.recipes.get(key(run))
    if costs is None or options.target is None:
        return profile
    if not here and not learning.answers(costs.learning, run, options.target, strategies):
        named = "" if options.strategies is None else f" --strategies {quoted(options.strategies)}"
        raise Refusal(
            f"{path} is of another machine, and does not say how fast {run.recipe} with these settings "
            f"reaches {options.target:g}. Measure it there: murmurate plan {quoted(run.recipe)} --profile "
            f"--target {options.target:g}{named} --on FILE."
        )
    if here:
        keep = functools.partial(_keep, profile, path)
        choice.learn(run, profile, options.target, _say, strategies, keep=keep, again=options.profile)
    return profile


def _measured_rates(candidates: Sequence[Candidate]) -> tuple[dict[str, float], set[str]]:
    """Measured rates of the best few candidates, in the run's unit (env steps, say) per second, by name;
    and the names of those that failed."""
    from murmurate.mapping.check import measured
    from murmurate.mapping.rounds import last_line

    rates, failed = dict[str, float](), set[str]()
    for candidate in candidates[:_MOST_CHECKED]:
        try:
            rate = rates[candidate.name] = measured(candidate.run)
        except (Refusal, RunFailed) as failure:
            _say(f"{candidate.name}: not measured: {last_line(failure)}")
            failed.add(candidate.name)
            continue
        predicted = candidate.prediction.env_steps_per_second
        _say(
            f"{candidate.name}: {rate:,.0f} {candidate.run.unit}/s, predicted {predicted:,.0f} "
            f"({predicted / rate:.2f} times as many)"
        )
    return rates, failed


def _fastest(candidates: Iterable[Candidate], rates: Mapping[str, float]) -> Candidate:
    return max((each for each in candidates if each.name in rates), key=lambda each: rates[each.name])


def _verdict(candidates: Sequence[Candidate], rates: Mapping[str, float], unit: str) -> str:
    """What the check says of the predictions."""
    checked = [each for each in candidates if each.name in rates]
    off = max(abs(math.log(each.prediction.env_steps_per_second / rates[each.name])) for each in checked)
    fastest = _fastest(checked, rates)
    said = f"fastest of the {len(checked)} that were run: {fastest.name}, {rates[fastest.name]:,.0f} {unit}/s"
    if off > math.log(_FAR_OFF):
        said += (
            f". A prediction is off by a factor of {math.exp(off):.1f}. If other programs run now, or ran "
            "when the costs were measured, stop them, and measure again: --profile"
        )
    return said


def _show(
    run: Run,
    candidates: Sequence[Candidate],
    where: str,
    rates: Mapping[str, float],
) -> None:
    import rich.console
    import rich.table
    from rich.text import Text

    unit = candidates[0].unit
    table = rich.table.Table(title=Text(f"{run.recipe} on {where}: {len(candidates)} configurations"))
    table.add_column("configuration")
    table.add_column(f"predicted {unit}", justify="right")
    if rates:
        table.add_column(f"measured {run.unit}/s", justify="right")
    table.add_column("why")
    unchanged = next((c for c in candidates if not c.changes), None)
    shown = [
        *candidates[:_MOST_SHOWN],
        *([unchanged] if unchanged is not None and unchanged not in candidates[:_MOST_SHOWN] else []),
    ]
    for candidate in shown:
        measured = [f"{rates[candidate.name]:,.0f}" if candidate.name in rates else ""] * bool(rates)
        table.add_row(*map(Text, (candidate.name, candidate.figure, *measured, candidate.why)))
    rich.console.Console().print(table)


def machine(cores: int, hosts: int) -> str:
    """What a plan is for, in words. cores: of each host."""
    each = "1 core" if cores == 1 else f"{cores} cores"
    return each if hosts == 1 else f"{hosts} hosts of {each} each"


def _apply(best: Candidate, options: argparse.Namespace) -> int:
    from murmurate.launch import launcher
    from murmurate.recipes import stored
    from murmurate.training.session import train

    # with --json standard output is the JSON alone
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        return report_end(train(best.run, options.out, launcher(best.run.launcher), stored))
