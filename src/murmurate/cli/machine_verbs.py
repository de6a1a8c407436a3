"""``murmurate list``, ``bench``, ``doctor`` and ``secret``."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from typing import Any

from murmurate.cli.help import Fields
from murmurate.cli.options import change


def add_verbs(verbs: Any) -> None:
    listing = verbs.add_parser(
        "list", help="list recipes, worlds, strategies, agents, fabrics, launchers or benches"
    )
    listing.add_argument("what", nargs="?", default="recipes")
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(act=_list)
    bench = verbs.add_parser("bench", help="benchmark against other libraries and physical limits")
    bench.add_argument("name", help="see: murmurate list benches")
    bench.add_argument("--json", action="store_true", help="no table: standard output is the JSON alone")
    bench.add_argument("--full", action="store_true", help="longer and with all peers")
    bench.set_defaults(act=_bench, fields=_bench_fields)
    doctor = verbs.add_parser("doctor", help="check this machine, with advice for what is missing")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(act=_doctor)
    secret = verbs.add_parser(
        "secret",
        help="print a new MURMURATE_SECRET, for runs on several hosts",
        description="Print a random secret. Members of a run on several hosts authenticate and encrypt what "
        "they send each other with the secret in MURMURATE_SECRET: set it to the same one on every host.",
    )
    secret.set_defaults(act=_secret)


def _list(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.cli.listing import listing, show

    rows = listing(options.what)
    if options.json:
        print(json.dumps(rows))
    else:
        show(options.what, rows)
    return 0


def _bench(options: argparse.Namespace, rest: list[str]) -> int:
    import psutil

    from murmurate.bench import bench

    def end(*_: object) -> None:
        """End this process and all processes of the benchmark, including those just being started."""
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        sys.exit(128 + signal.SIGTERM)

    earlier = signal.signal(signal.SIGTERM, end)
    try:
        result = bench(
            options.name,
            full=options.full,
            table=not options.json,
            options=rest,
            change=lambda plan, words: change(plan, words, f"murmurate bench {options.name}"),
        )
    finally:  # for a caller in this process
        signal.signal(signal.SIGTERM, earlier or signal.SIG_DFL)
    print(json.dumps(result))
    return 0


def _bench_fields(options: argparse.Namespace | None, rest: list[str]) -> Fields:
    if options is None:
        note = "Options change how much is measured: murmurate bench NAME --help"
        return Fields("murmurate bench NAME [--json] [--full] [--FIELD VALUE ...]", note=note)
    from murmurate.bench import benchmark

    module = benchmark(options.name)
    plan = module.FULL if options.full else module.QUICK
    usage = f"murmurate bench {options.name} [--json] [--full] [--FIELD VALUE ...]"
    return Fields(usage, [("how much is measured", plan)], note=module.SUMMARY)


def _doctor(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.cli.doctor import findings, show

    report = findings()
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0


def _secret(options: argparse.Namespace, rest: list[str]) -> int:
    from murmurate.launch.secret import drawn_secret

    print(drawn_secret())
    return 0
