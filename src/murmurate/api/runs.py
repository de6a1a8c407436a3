"""``murmurate.train``, ``simulate``, ``resume`` and ``recipe``."""

from __future__ import annotations

import dataclasses
import os
import pickle
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from murmurate import plugins, recipes
from murmurate.api.fields import with_fields
from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.processes.spawn import refuse_import
from murmurate.launch import api_launcher
from murmurate.record.callbacks import Callback, Result, Watch, checked, watching
from murmurate.replicator.learner import LearnerConfig
from murmurate.simulation import start as simulation
from murmurate.simulation.cluster import Cluster
from murmurate.spec import Placement
from murmurate.strategies import strategies, strategy_from
from murmurate.strategies.interface import Strategy
from murmurate.training import ends, session
from murmurate.training.checkpoint import kept_sentence
from murmurate.training.launcher import Launcher
from murmurate.training.run import Run
from murmurate.training.threads import keeping_threads
from murmurate.worlds.interface import SimulatorWorld
from murmurate.worlds.own import replaced_by, world_of

_TERMINATED = 143


def recipe(name: str) -> Run:
    """The run called ``<world>-<algorithm>``: a frozen value, to look at, change with
    ``dataclasses.replace``, and give to ``train``.

    Raises Refusal with the nearest name for an unknown one.
    """
    return recipes.recipe(name)


def train(
    recipe: str | Run | None = None,
    *,
    env: str | Callable[..., Any] | None = None,
    algorithm: str | None = None,
    strategy: str | Strategy | Mapping[str, object] | None = None,
    replicas: int | None = None,
    env_steps: int | None = None,
    updates: int | None = None,
    minutes: float | None = None,
    passes: float | None = None,
    stop_at_return: float | None = None,
    seed: int | None = None,
    launcher: str | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    agent: LearnerConfig | Mapping[str, object] | None = None,
    world: SimulatorWorld | Mapping[str, object] | None = None,
    placement: Placement | Mapping[str, object] | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **fields: object,
) -> Result:
    """Train, and return how the run ended and where its folder is.

    Processes of the default launcher import the script again, so call this under
    ``if __name__ == "__main__":``; ``launcher="inline"`` starts none.

    Args:
        recipe: a name from ``murmurate list recipes``, or a ``Run``; else give ``env`` and ``algorithm``.
        env: a class or function without arguments that returns a ``gymnasium.Env``, or its name
            (``"gym:Acrobot-v1"``, ``"my_module:make_env"``). Lambdas and nested functions need the launcher
            inline.
        algorithm: for ``env``, the part of a recipe's name after the world, such as "a2c".
        strategy: how the replicas agree: a name, an object with other hyper-parameters, or a mapping of them
            (``{"name": "gala", "staleness_bound": 2}``).
        replicas, seed, launcher: as the options of the command line.
        env_steps, updates, minutes, stop_at_return: where the run ends, whichever comes first: env steps of
            all replicas together, updates of each replica, wall time, mean return of the last 100 episodes.
        passes: for a data set, in place of ``env_steps``: passes of all replicas together through the
            training examples.
        out: the run folder; by default a new one in ``runs/``.
        resume: ``--continue``: if ``out`` holds this run, go on from its checkpoint, or return its result if
            it has finished; else begin. What a run left there that saved no checkpoint is renamed.
        agent, world, placement: mappings of their fields (``agent={"learning_rate": 1e-3}``), or objects.
        callbacks: called with what the run records; see ``Callback``.
        quiet: print no progress.
        fields: every other option of the command line, with underscores: ``simulators=16``,
            ``replay={"capacity": 100_000}``, ``eval_episodes=5``. None leaves a field as the recipe has it;
            to set it to None, give ``dataclasses.replace(murmurate.recipe(name), env_steps=None)``.

    Raises:
        Refusal: before anything was changed; its text says what to change.
        RunFailed: the run began and could not go on (its checkpoint is kept), or a callback failed.
        KeyboardInterrupt: after Ctrl-C, when all is saved; SystemExit after SIGTERM.
    """
    refuse_import()
    out = None if out is None else _absolute(out)
    base = _base_run(recipe, env, algorithm)
    arguments = {
        "strategy": strategy, "replicas": replicas, "env_steps": env_steps, "updates": updates,
        "minutes": minutes, "stop_at_return": stop_at_return, "seed": seed, "launcher": launcher,
        "agent": agent, "world": world, "placement": placement, **fields,
    }  # fmt: skip
    given = {name: value for name, value in arguments.items() if value is not None}
    run = _ended(configured(_open_ended(recipe, base, given), given), given, passes)
    if isinstance(recipe, Run):  # with a name the learner's class is checked as its fields are set
        _check_learner(run)
    _check_is_found_again(run.strategy)
    engine = api_launcher(run.launcher)
    if (ranks := engine.dictated_replicas()) is not None:
        run = dataclasses.replace(run, replicas=ranks)
    _refuse_unpicklable(run, engine)
    working_folder = Path.cwd()
    with keeping_threads(), watching(Watch(checked(callbacks), quiet)):
        finish = session.train(run, out, engine, recipes.stored, goes_on=resume)
    return _result(finish, working_folder, quiet)


def simulate(
    recipe: str | Run | None = None,
    *,
    cluster: Cluster | Mapping[str, object] | None = None,
    env: str | Callable[..., Any] | None = None,
    algorithm: str | None = None,
    passes: float | None = None,
    out: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **fields: object,
) -> Result:
    """Train on a simulated cluster of any size, in this process, and return how the run ended.

    Every replica learns as in ``train``; only time is simulated (``docs/simulate.md``).

    Args:
        cluster: step times, network and faults: a ``Cluster``, or a mapping of its fields
            (``{"compute": "straggler:0.01,4", "crash_every_seconds": 3}``).
        recipe, env, algorithm, passes, out, callbacks, quiet: as in ``train``.
        fields: the other arguments of ``train`` (``replicas=128``, ``strategy="gala"``, ``updates=100``).
            ``updates`` or ``minutes`` (of virtual time) replace the ``env_steps`` at which a recipe given by
            its name ends.

    Raises:
        Refusal, RunFailed, KeyboardInterrupt, SystemExit: as ``train``; Refusal also for what a simulation
            has not: a launcher, loggers, restarts, actors, evaluations during the run.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    out = None if out is None else _absolute(out)
    base = _base_run(recipe, env, algorithm)
    if not isinstance(recipe, Run) and given.keys() & {"updates", "minutes"}:
        # many replicas would reach the recipe's end at once
        base = dataclasses.replace(base, env_steps=None)
    run = _ended(configured(_open_ended(recipe, base, given), given), given, passes)
    _check_is_found_again(run.strategy)
    if cluster is None or isinstance(cluster, Mapping):
        settings: Cluster = with_fields(Cluster(), cluster or {}, "cluster.")
    elif isinstance(cluster, Cluster):
        settings = cluster
    else:
        raise Refusal(f"cluster is {cluster!r}; it takes a mapping, or a murmurate.Cluster.")
    working_folder = Path.cwd()
    with keeping_threads(), watching(Watch(checked(callbacks), quiet)):
        finish = simulation.simulate(run, settings, out, quiet)
    return _result(finish, working_folder, quiet)


def resume(
    folder: str | os.PathLike[str],
    *,
    env: str | Callable[..., Any] | None = None,
    env_steps: int | None = None,
    updates: int | None = None,
    minutes: float | None = None,
    launcher: str | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **fields: object,
) -> Result:
    """Continue a run from its newest checkpoint. Arguments are those of ``train``; they may change its end.

    Args:
        env: makes the environment, where the folder cannot name it (a lambda, say), or its file has moved.

    Raises:
        Refusal: with nothing changed: no checkpoint, or a field that cannot change.
        RunFailed, KeyboardInterrupt, SystemExit: as ``train``.
    """
    refuse_import()
    run_folder = _absolute(folder)
    options = {"env_steps": env_steps, "updates": updates, "minutes": minutes, "launcher": launcher, **fields}
    new = {name: value for name, value in options.items() if value is not None}

    def change(run: Run) -> Run:
        changed = configured(run, new)
        _refuse_unpicklable(changed, api_launcher(changed.launcher))
        return changed

    with replaced_by(env) as replacement, keeping_threads(), watching(Watch(checked(callbacks), quiet)):
        finish = session.resume(
            run_folder,
            api_launcher,
            recipes.stored,
            change,
            lambda run: recipes.relocated(run, replacement),
        )
    return _result(finish, Path(), quiet)


def configured(run: Run, values: Mapping[str, Any]) -> Run:
    """``run`` with fields replaced (``fields.with_fields``); a strategy may be given by its name."""
    values = dict(values)
    if "strategy" in values:
        given, settings = values.pop("strategy"), {}
        if isinstance(given, Mapping):
            settings = {name: value for name, value in given.items() if name != "name"}
            given = given.get("name", run.strategy.name)
        chosen = run.strategy if given == run.strategy.name else strategy_from(given)
        run = dataclasses.replace(run, strategy=with_fields(chosen, settings, "strategy."))
    changed: Run = with_fields(run, values)
    return changed


def _absolute(folder: str | os.PathLike[str]) -> Path:
    """Environments and callbacks may change the working folder."""
    return Path(folder).expanduser().absolute()


def _base_run(recipe: str | Run | None, env: str | Callable[..., Any] | None, algorithm: str | None) -> Run:
    """The Run of a recipe, or of an environment and an algorithm. Raises Refusal for neither and for both."""
    if isinstance(recipe, (str, Run)):
        if env is not None or algorithm is not None:
            raise Refusal(
                "a recipe names environment and algorithm: leave it out, as in train(env=make_env, "
                'algorithm="a2c"), or leave out env and algorithm.'
            )
        return recipes.recipe(recipe) if isinstance(recipe, str) else recipe
    if recipe is not None:
        remedy = " An environment is given as env=." if callable(recipe) else ""
        raise Refusal(f"recipe is {recipe!r}; it takes a name (murmurate list recipes), or a Run.{remedy}")
    if env is None or algorithm is None:
        raise Refusal(
            'say what to train: train("cartpole-a2c"), or train(env=make_env, algorithm="a2c"). '
            "See: murmurate list recipes"
        )
    recipes.check_algorithm(algorithm)
    world = world_of(env)
    run = recipes.recipe(f"{world.name}-{algorithm}")
    return dataclasses.replace(run, world=world)


def _open_ended(recipe: str | Run | None, base: Run, given: Collection[str]) -> Run:
    """``base``, without the end of a recipe that is given by its name, where another end takes its place."""
    return base if isinstance(recipe, Run) else ends.without_recipe_end(base, ends.ENDS & set(given))


def _ended(run: Run, given: Collection[str], passes: float | None) -> Run:
    """``run``, ended after ``passes``, if there are any."""
    return run if passes is None else ends.after_passes(run, passes, ends.ENDS & set(given))


def _check_learner(run: Run) -> None:
    """Raise Refusal for a learner of another class than the recipe's, as which the folder would be read."""
    usual = recipes.recipe(run.recipe).learner
    if type(run.learner) is not type(usual):
        raise Refusal(
            f"the learner is a {type(run.learner).__name__}, and the recipe {run.recipe} has a "
            f"{type(usual).__name__}, as which its run folder would be read. Begin with another recipe: "
            "murmurate list recipes."
        )


def _check_is_found_again(strategy: Strategy) -> None:
    """Warn if the run folder, which has the strategy's name, could not be read again; raise Refusal if it
    would be read as a run with another strategy, which has the same name."""
    name, kind = strategy.name, type(strategy)
    if (known := strategies().get(name)) is not None:
        plugins.refuse_clash("strategies", name, known, kind)
        return
    warnings.warn(
        f"no module that murmurate knows defines the strategy {name}, so resume, eval, report and load would "
        f"not find it. Set {plugins.IMPORTS} to the file that defines {kind.__name__}, before the run, or "
        "install it as an entry point (docs/contributing.md).",
        stacklevel=3,
    )


def _refuse_unpicklable(run: Run, engine: Launcher) -> None:
    """Raise Refusal for a run that cannot be sent to the processes of its launcher."""
    if engine.one_process:
        return
    try:
        pickle.dumps(run)
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(
            f"the run cannot be sent to another process ({error}). Define its classes and functions at "
            "module level, or use launcher='inline'."
        ) from error


def _result(finish: session.Finish, working_folder: Path, quiet: bool) -> Result:
    """The result of a run that finished. Raises for one that did not: see ``train``.

    working_folder: the one in which the run began, as environments and callbacks may change it.
    """
    run_folder, summary = working_folder / finish.folder, finish.summary
    if summary is None:  # another rank leads the run
        if finish.code:
            raise RunFailed(f"the run failed on the rank that leads it (exit code {finish.code}).")
        return Result(run_folder, {}, finish.code)
    if finish.sentence and not quiet:
        unit = "env steps" if finish.run is None else finish.run.unit
        print(f"{summary['env_steps']:,} {unit} in {summary['wall_seconds']:.0f} s. {finish.sentence}")
    if finish.code == session.FAILED:
        kept = kept_sentence(run_folder, finish.resumable, finish.command_prefix)
        raise RunFailed(f"{str(summary['exit']).rstrip('. ')}. {kept}") from finish.error
    if finish.code == _TERMINATED:
        raise SystemExit(_TERMINATED)
    if finish.code:
        if finish.resumable and not (run_folder / "checkpoints" / "last").exists():
            # a second Ctrl-C came before a checkpoint
            raise KeyboardInterrupt(kept_sentence(run_folder, command_prefix=finish.command_prefix))
        next_call = f"; go on with murmurate.resume('{run_folder}')" if finish.resumable else ""
        raise KeyboardInterrupt(f"the run is saved{next_call}")
    return Result(run_folder, summary, finish.code)
