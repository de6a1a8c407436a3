"""The protocol of script launchers: how ``murmurate.run`` starts the members of a user's own script."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from murmurate.errors import Refusal
from murmurate.fabric.interface import Capability
from murmurate.launch.rendezvous import Environment
from murmurate.launch.script_arguments import default_threads, gpus_here, refuse_missing_gpus
from murmurate.launch.script_member import ScriptSettings

Devices = tuple[tuple[str, ...], ...]  # of the members, in turn; several names are those of one replica


class ScriptLauncher(ABC):
    """Runs the members of a user's script (see ``murmurate.run``); made for each call.

    ``murmurate.run`` finds the classes that inherit it in ``murmurate/launch``, and in modules that an entry
    point adds to that folder; a name of this package's own launchers means these, whatever else has it. What
    a class leaves out is that of a launcher whose members are all on this host.
    """

    name: ClassVar[str]
    offers: frozenset[Capability] = frozenset(Capability)  # what the fabric between the members can do
    place: str = "this host"  # what offers that, in words (for messages)

    def __init__(self, environment: Environment | None) -> None:
        """environment: that of torchrun, if it started this process. Raises Refusal if it started several,
        as each would start members of its own."""
        if environment is not None and environment.size > 1:
            raise Refusal(
                f"torchrun started this script {environment.size} times, and each would start replicas of "
                f"its own by launcher='{self.name}'. Leave launcher out: then each rank is a replica."
            )

    def replicas(self, given: int | None, grid: tuple[int, int]) -> int:
        """The number of replicas where ``given`` is asked for. grid: rows and columns of parts of each.

        Raises Refusal if there cannot be as many.
        """
        return 1 if given is None else given

    def devices(self, named: Devices) -> Devices:
        """The devices of the members, in turn: ``named``, or those of ``devices="auto"`` if it is empty.

        Raises Refusal for devices that the members would not have.
        """
        devices = named or gpus_here()
        refuse_missing_gpus(devices)
        return devices

    def threads(self, members: int) -> int:
        """Torch threads of each of ``members``, where the script names no number."""
        return default_threads(members)

    @abstractmethod
    def run(self, settings: ScriptSettings) -> list[Any]:
        """Run ``settings.members`` members to their end, and return the results of the replicas, by rank.

        A member that has a process of its own calls ``settings.run_to_exit(fabric, out)``, with its fabric
        and a stream for its output; an error that this raises is made an Exit by ``Exit.failed``, and
        ``settings.result_of`` makes the member's result of its Exit. Members that are threads of one process
        share its stdout and torch's settings, which ``run_to_exit`` would change for all of them:
        ``script_inline.run_in_threads`` runs these.

        ``settings.results`` makes the results of the replicas of all members' results. Once a member has
        ended with an error, the others must be told, and ended, or they would wait for it. Its error is to be
        raised, not one of a member that waited: Refusal or RunFailed, as ``murmurate.run`` says.
        """
