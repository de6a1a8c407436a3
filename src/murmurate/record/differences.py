"""What runs that are shown together differ in beside their settings: files of the user's own, versions of
packages, machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from murmurate.record.runs import RecordedRun


def differing_files(runs: Iterable[RecordedRun]) -> list[str]:
    """The names of the user's own files that are not the same in all of the ``runs`` that have them.

    Names are without folders, as a file may be in another folder on another machine.
    """
    found: dict[str, set[tuple[str, ...]]] = {}
    for run in runs:
        for name, digests in _files(run).items():
            found.setdefault(name, set()).add(digests)
    return sorted(name for name, contents in found.items() if len(contents) > 1)


def contents(run: RecordedRun, names: Iterable[str]) -> tuple[tuple[str, ...] | None, ...]:
    """Digests of the user's own files that are called so; None where the run has no such file."""
    files = _files(run)
    return tuple(files.get(name) for name in names)


def machine(run: RecordedRun) -> str:
    """The processor of the host that started a run, its cores and its GPUs, as far as they were recorded."""
    hardware = run.run.get("hardware")
    if not isinstance(hardware, dict):
        return hardware if isinstance(hardware, str) else ""
    names = [hardware.get(key) for key in ("cpu", "processor", "gpu")]
    if (cores := hardware.get("cores")) is not None:
        names.insert(1, f"{cores} core{'s' if cores != 1 else ''}")
    names += hardware.get("gpus") or []
    return ", ".join(name for name in names if isinstance(name, str) and name)


def notes(runs: Sequence[RecordedRun]) -> list[str]:
    """A sentence for each kind of difference among ``runs``."""
    sentences = []
    if files := _changed_files(runs):
        sentences.append(f"Not all runs had the same {' and '.join(files)}; those of one group had.")
    if versions := _differing_versions(runs):
        sentences.append(f"Not all runs had the same versions: {'; '.join(versions)}.")
    machines = Counter(machine(run) or "unknown" for run in runs if not run.virtual)
    if len(machines) > 1:
        sentences.append(
            "The runs were on different machines, on which seconds and speeds depend: "
            f"{'; '.join(_counted(machines))}."
        )
    return sentences


def _changed_files(runs: Iterable[RecordedRun]) -> list[str]:
    """As ``differing_files``, but different strategies or recipes may have different files of one name."""
    alike: dict[tuple[str, str], list[RecordedRun]] = {}
    by_path: dict[str, set[str]] = {}
    for run in runs:
        alike.setdefault((run.recipe, run.strategy_name), []).append(run)
        for path, digest in _stored(run, "files").items():
            by_path.setdefault(path, set()).add(digest)
    names = {name for same in alike.values() for name in differing_files(same)}
    return sorted(names | {Path(path).name for path, digests in by_path.items() if len(digests) > 1})


def _files(run: RecordedRun) -> dict[str, tuple[str, ...]]:
    """The digests of the user's own files by name: one, or several of files of one name."""
    digests: dict[str, list[str]] = {}
    for path, digest in _stored(run, "files").items():
        digests.setdefault(Path(path).name, []).append(digest)
    return {name: tuple(sorted(found)) for name, found in digests.items()}


def _differing_versions(runs: Iterable[RecordedRun]) -> list[str]:
    """The packages of which ``runs`` recorded several versions, each with how many runs had which."""
    found: dict[str, Counter[str]] = {}
    for run in runs:
        for package, version in _stored(run, "versions").items():
            found.setdefault(package, Counter())[version] += 1
    return [
        f"{package} {', '.join(_counted(versions))}"
        for package, versions in sorted(found.items())
        if len(versions) > 1
    ]


def _stored(run: RecordedRun, key: str) -> dict[str, str]:
    """An object of texts in run.json; empty if it has none."""
    value = run.run.get(key)
    return {name: str(text) for name, text in value.items()} if isinstance(value, dict) else {}


def _counted(values: Counter[str]) -> list[str]:
    """Each value with the number of runs that have it."""
    return [f"{value} ({count} run{'s' if count > 1 else ''})" for value, count in values.items()]
