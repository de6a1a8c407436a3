"""Rebuild a learner from a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from murmurate.errors import Refusal, RunFailed
from murmurate.fabric.interface import Fabric
from murmurate.record.stored import UNSOUND
from murmurate.replica.state_dict import tensors_of, write_values
from murmurate.replica.vector import Replica
from murmurate.replicator.learner import Context, Learner
from murmurate.replicator.replicator import Replicator, begins_with
from murmurate.training import checkpoint
from murmurate.training.data_record import read_fingerprint
from murmurate.training.run import Run


@contextlib.contextmanager
def refusing_misfits(saved: Path | str) -> Iterator[None]:
    """Used around code that loads ``saved``: raises Refusal if ``saved`` does not fit this run."""
    try:
        yield
    except Refusal as refusal:
        raise Refusal(f"{saved} does not fit this run: {refusal}") from refusal
    except torch.OutOfMemoryError as error:  # a RuntimeError
        raise RunFailed(
            f"there is too little memory on the GPU for {saved}. End what else uses it, or hide it from "
            "torch: CUDA_VISIBLE_DEVICES= murmurate ..."
        ) from error
    except UNSOUND as error:
        cause = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise Refusal(
            f"{saved} does not fit this run ({cause}). Resume with the fields it was made with."
        ) from error


def load_agent(run: Run, folder: Path, of: Path | None = None, device: torch.device | None = None) -> Any:
    """The learner (an agent, if it acts) with the consensus parameters of a checkpoint folder, such as
    ``checkpoints/last``. of: the run folder, where the checkpoint is a copy outside of it.

    Floating-point buffers are the mean over the replicas saved in the checkpoint. A data set is not read: the
    run folder stores its spec. device: of the learner; None: the CPU. Raises Refusal if the checkpoint is
    damaged, or not of this run.
    """
    torch.set_num_threads(run.placement.threads)
    fingerprint = read_fingerprint(run_folder(folder) if of is None else of)
    with refusing_misfits(folder):
        spec, where = run.world.spec(fingerprint), device or torch.device("cpu")
        agent = run.learner.build(Context(spec, Replica, run.seed, where))
        states, values = checkpoint.undisturbed(folder, lambda path: _read(path, run.replicas))
        for name, replica in agent.replicas.items():
            write_values(replica, values[name])
            # how much an agent explores may depend on its updates
            clocks = (int(state["replicas"][name]["replica"]["clock"]) for state in states)
            replica.clock = statistics.median_high(clocks)
    return agent


def load_chosen(
    run: Run,
    folder: Path,
    *,
    take_best: bool = False,
    path: Path | None = None,
    device: torch.device | None = None,
) -> tuple[Path, Any]:
    """(a checkpoint, its learner as from ``load_agent``): the one at ``path``, which may be a copy without
    replays; else the best one in the run folder ``folder`` or, without ``take_best``, its newest.

    Warns of a checkpoint in another run's folder. Raises Refusal if there is none, or it is damaged or not of
    this run, and for both ``take_best`` and ``path``.
    """

    def load(chosen: Path) -> Any:
        return load_agent(run, chosen, folder, device)

    if take_best and path is not None:
        raise Refusal(
            "--best and --checkpoint (in Python: best and checkpoint) choose two checkpoints. Leave one of "
            "them out."
        )
    if path is None and not take_best:
        return checkpoint.load_newest(folder / "checkpoints", load)
    chosen = checkpoint.best(folder / "checkpoints") if path is None else path
    if take_best and not run.evaluation.plays and not chosen.exists():
        raise Refusal(
            f"{run.recipe} keeps no best checkpoint: it has no returns to choose one by, and the figures of "
            "test data must not choose it, as they would then be biased. Use the last checkpoint instead: "
            "leave out --best (in Python: best)."
        )
    problem = _problem(chosen)
    if problem is not None and take_best:  # a run that goes on may have moved it, or put it back, meanwhile
        chosen = checkpoint.best(folder / "checkpoints")
        problem = _problem(chosen)
    if problem is not None:
        option = "--checkpoint (in Python: checkpoint)" if path else "--best (in Python: best)"
        raise Refusal(f"{problem} Use the last checkpoint instead: leave out {option}.")
    holder = run_folder(chosen.resolve())
    if (holder / "run.json").exists() and not holder.samefile(folder):
        asked = folder.resolve()
        warnings.warn(f"{chosen} is a checkpoint of the run in {holder}, and not of {asked}", stacklevel=2)
    return chosen, load(chosen)


def _problem(chosen: Path) -> str | None:
    return checkpoint.undisturbed(chosen, lambda each: checkpoint.damage(each, replays=False))


def consensus(folder: Path, replicas: int) -> dict[str, dict[str, Tensor]]:
    """The consensus of a checkpoint: for each replicated module, parameters and buffers by name.

    replicas: number of replicas of its run. Raises Refusal for a part that is unreadable.
    """
    return _read(folder, replicas)[1]


def _read(folder: Path, replicas: int) -> tuple[list[dict[str, Any]], dict[str, dict[str, Tensor]]]:
    """The parts of the replicas in a checkpoint, and their consensus."""
    states = [checkpoint.read_part(folder, rank) for rank in learners(folder, replicas)]
    # the part that was saved last has the newest consensus
    latest = max(states, key=lambda state: state["seconds"])
    if replicas in checkpoint.parts(folder):  # the centre's
        latest = checkpoint.read_part(folder, replicas)
    values: dict[str, dict[str, Tensor]] = {}
    for name, module in latest["consensus"].items():
        values[name] = dict(module["params"])
        for key in states[0]["replicas"][name]["replica"]["buffers"]:
            saved = [state["replicas"][name]["replica"]["buffers"][key] for state in states]
            values[name][key] = torch.stack(saved).mean(0) if saved[0].is_floating_point() else saved[0]
    return states, values


def initial_values(run: Run) -> dict[str, dict[str, Tensor]]:
    """What a new run starts from, by the names of its replicas: the consensus of ``run.initial``, which is a
    checkpoint or a run whose last one is taken; or nothing.

    Raises Refusal if there is no checkpoint, or it is damaged.
    """
    if run.initial is None:
        return {}
    chosen = folder = Path(run.initial)
    if (folder / "checkpoints").is_dir():
        chosen = checkpoint.newest(folder / "checkpoints", replays=False)
    elif not checkpoint.is_one(folder):
        raise Refusal(
            f"{folder} is no folder of a run with checkpoints, and no checkpoint such as "
            "RUN/checkpoints/best, so --initial cannot start from it."
        )

    def read(path: Path) -> dict[str, dict[str, Tensor]]:
        if (problem := checkpoint.damage(path, replays=False)) is not None:
            raise Refusal(f"{problem} Give --initial another checkpoint, or the folder of a run.")
        return consensus(path, int(checkpoint.read_manifest(path)["replicas"]))

    with refusing_misfits(chosen):
        return checkpoint.undisturbed(chosen, read)


def replicator_of(run: Run, fabric: Fabric, starts_anew: bool = True) -> Replicator:
    """The replicator of one member of ``run``.

    starts_anew: the member starts from the run that ``initial`` names, if there is one, and not from a
    checkpoint or a peer's state. Raises Refusal as ``initial_values``.
    """
    initial = initial_values(run) if starts_anew else {}
    return Replicator(run.strategy, fabric, initial=initial, initial_except=run.initial_except)


def without_initial(run: Run) -> Run:
    """``run`` without the other run that only its start reads."""
    return dataclasses.replace(run, initial=None, initial_except=())


def refuse_unknown_names(run: Run, learner: Learner, initial: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise Refusal for a name in ``run.initial_except`` that no parameter or buffer of either run has."""
    names = [name for replica in learner.replicas.values() for name in tensors_of(replica)]
    names += [name for values in initial.values() for name in values]
    for beginning in run.initial_except:
        if not any(begins_with(name, [beginning]) for name in names):
            raise Refusal(
                f"--initial-except {beginning}: no parameter or buffer has that name. Names begin with "
                f"{', '.join(dict.fromkeys(name.partition('.')[0] for name in names))}."
            )


def warn_of_other_classes(run: Run, folder: Path) -> None:
    """Warn if the run starts from a classifier of as many classes with other names."""
    if run.initial is None or run.initial_except:
        return
    initial = Path(run.initial)
    others = run_folder(initial) if checkpoint.is_one(initial) else initial
    own, other = (data and data.get("classes") for data in map(read_fingerprint, (folder, others)))
    if own and other and len(own) == len(other) and own != other:
        first, there = next((a, b) for a, b in zip(own, other, strict=True) if a != b)
        warnings.warn(
            f"{run.initial} was trained on other classes ({there} in place of {first}): the outputs start as "
            "those of its classes. --initial-except head starts the last layer anew.",
            stacklevel=2,
        )


def run_folder(checkpoint_folder: Path) -> Path:
    """The run folder of a checkpoint folder."""
    return checkpoint_folder.absolute().parent.parent  # of a folder in the root: the root


def learners(folder: Path, replicas: int) -> list[int]:
    """Ranks of the replicas whose parts are in a checkpoint; a centre's part is not among them."""
    return [rank for rank in checkpoint.parts(folder) if rank < replicas]
