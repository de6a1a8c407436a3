"""What ``murmurate plan`` refuses before anything is measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from murmurate.errors import Refusal

if TYPE_CHECKING:
    from murmurate.training.run import Run

# what --link, which makes no plan, has no use for
_OF_PLANS = (
    "strategy", "strategies", "profile", "objective", "target", "watts", "check", "apply", "out", "page",
    "json",
)  # fmt: skip


def check_link(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raise Refusal for options beside ``--link`` that it would ignore. rest: words that no option took."""
    values = {name: getattr(options, name) for name in _OF_PLANS}
    useless = [f"--{name}" for name, value in values.items() if value is not None and value is not False]
    useless += ["--hosts"] * (options.hosts > 1) + [word.partition("=")[0] for word in rest[:1]]
    if useless:
        raise Refusal(
            "--link only measures the network between two hosts, and makes no plan: leave out "
            f"{', '.join(useless)}."
        )


def check_options(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raise Refusal for options of a plan that contradict each other. rest: as in ``check_link``."""
    for verb, does in (("check", "runs configurations"), ("apply", "trains")):
        if options.hosts > 1 and getattr(options, verb):
            raise Refusal(f"--{verb} {does} on this host, and the plan is for several. Leave out --hosts.")
    if options.check and options.on is not None:
        raise Refusal("--check runs the candidates here, and --on is of a machine that need not be this one.")
    if options.out is not None and not options.apply:
        raise Refusal("--out is the run folder of --apply. Add --apply, or leave --out out.")
    if any(word.partition("=")[0] == "--env" for word in rest):
        raise Refusal(
            "plan takes no --env. For a registered environment name the recipe: murmurate plan "
            "gym:CartPole-v1-a2c"
        )


def check_apply(run: Run) -> None:
    """Raise Refusal if ``--apply`` could not start what is planned for ``run``."""
    from murmurate.launch import command_launcher

    if run.launcher == "torchrun":
        raise Refusal(
            "--apply starts as many replicas as are best, and torchrun starts the replicas itself. Leave out "
            "--apply, and start as many ranks as the command that plan prints has replicas; or leave out "
            "--launcher."
        )
    command_launcher(run.launcher).check(run)


def check_outputs(options: argparse.Namespace, profile: Path) -> None:
    """Raise Refusal for a page or a run folder that cannot be written. profile: the measured costs' file."""
    from murmurate.training.run_folder import claim, unclaim

    page: Path | None = options.page
    if page is not None and page.resolve() == profile.resolve():
        raise Refusal(f"--page would write over {page}, which holds the measured costs. Name another file.")
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        wrong = f"{page} is a folder" if page.is_dir() else f"there is no folder {page.parent}"
        raise Refusal(f"--page names the file to write, and {wrong}. Name a file in a folder that is there.")
    if options.out is not None:
        existed = options.out.exists()
        claim(options.out)
        unclaim(options.out, existed)
