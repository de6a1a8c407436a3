"""The protocol of launchers, which start the workers of a run (``murmurate/launch`` implements it)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability

if TYPE_CHECKING:  # scripts list no launchers, and need not import a run
    from murmurate.training.coordinator import Coordinator
    from murmurate.training.run import Run
    from murmurate.training.worker_context import Resume


class Ranks(Protocol):
    """The ranks that another engine (torchrun) started, seen from this process; the leader coordinates the
    run."""

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        ...

    def earlier_folder(self) -> Path | None:
        """The run folder that these ranks claimed before the engine restarted them; None at their first
        start."""
        ...

    def claimed(self, folder: Path) -> None:
        """Announce that the leader has claimed ``folder``."""
        ...

    def refuse(self) -> None:
        """Announce that the leader does not start, so that the others do not wait."""
        ...

    def finished(self, folder: Path) -> None:
        """Announce that the run in ``folder`` had finished before, which ends the others, too. Raises Refusal
        if they do not arrive."""
        ...

    def follow(self, own: Run, read: Callable[[Path], Run]) -> tuple[Path, int]:
        """On every other rank, execute this rank's part of the Run that ``read`` finds in the leader's
        folder; returns this folder and the exit code. own: the Run that this rank was asked for.

        Raises Refusal if the leader refused, if its folder cannot be seen from here, or if its Run is
        another; RunFailed if the run fails.
        """
        ...


class Launcher(ABC):
    """Starts the workers of a run and gives each a fabric, whatever the strategy.

    The first line of a launcher's docstring is its summary in ``murmurate list launchers``.
    """

    name: ClassVar[str]
    offers: ClassVar[frozenset[Capability]] = frozenset(Capability)  # the most that its channels can do
    restarts: ClassVar[bool] = False  # whether it supports Run.restarts
    one_process: ClassVar[bool] = False  # whether all workers are in this process
    sends: ClassVar[bool] = False  # whether vectors may go over a network, so that Run.compression applies
    command_prefix: ClassVar[str] = ""  # what a command that resumes a run begins with, such as "srun "

    def capabilities(self, run: Run) -> frozenset[Capability]:
        """What channels of ``run`` can do here and now. Raises Refusal if this cannot start here."""
        return self.offers

    def check(self, run: Run) -> None:
        """Raise Refusal for a run that this launcher cannot start, before anything is changed."""
        if run.restarts and not self.restarts:
            raise Refusal(
                f"restarts is {run.restarts}, and the {self.name} launcher does not start replicas again by "
                "that number (docs/launchers.md says what it does). Leave it out, or use --launcher local."
            )
        if not self.one_process and (why := run.world.bound_to_process()) is not None:
            raise Refusal(f"The {self.name} launcher starts other processes. {why}")
        if self.one_process and run.source.acting_processes():
            raise Refusal(
                f"actors are processes, and the {self.name} launcher has none. Use --launcher local, or "
                "--actors 0."
            )
        if run.compression != "none" and not self.sends:
            raise Refusal(
                f"compression is {run.compression}, and the {self.name} launcher keeps all replicas on one "
                "host, where vectors are not sent. Leave it out, or use --launcher torchrun."
            )

    @abstractmethod
    def start(self, run: Run, folder: Path, resume: Resume | None) -> Coordinator:
        """Run the workers to their end; the coordinator's ``failure`` is what made the run fail, or None.

        Raises Refusal if a worker refused before it began.
        """

    def adopt(self) -> Ranks | None:
        """The ranks that another engine started; None if this launcher starts the workers itself."""
        return None

    def dictated_replicas(self) -> int | None:
        """The number of replicas that the engine prescribes; None if the user chooses it."""
        return None
