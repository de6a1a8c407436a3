"""The commands of the pages outside the tutorials are run, as a reader would, page by page.

Each is run as it stands, with ``SHORTER`` behind it: the later of two options holds. ``NOT_RUN`` names what
needs more than this host, and why.
"""

from __future__ import annotations

import re
import shutil
import signal
import socket
import stat
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest
from shown import ROOT, lines
from test_deploy import COMMANDS
from test_tutorials import environment

from pictures import write_folder
from waiting import until

DOCS = ROOT / "docs"
SHORTER = {  # the first that a command begins with is put behind it
    "murmurate plan cartpole-a2c --target": "--target 30 --env-steps 20000",
    "murmurate plan pong-dqn": "--env-steps 3000 --replay.learning-starts 1000 --replay.capacity 20000",
    "murmurate plan": "--env-steps 3000",
    "murmurate resume": "--env-steps 6000",
    "murmurate simulate cartpole-gala --replicas 1000": "--updates 2",
    "murmurate simulate cartpole-a2c --replicas 128": "--env-steps 20000",
    "murmurate topics fit": "--passes 2",
    "murmurate train cartpole-gala --help": "",
    "murmurate train cartpole-a2c --seeds 0-4": "--seeds 0-1 --env-steps 1500",
    "murmurate train cartpole-a2c --seeds 0-9": "--seeds 0-2 --env-steps 1500",
    "murmurate train folder-resnet18": "--updates 2 --agent.batch 12 --world.size 32",
    "murmurate train": "--env-steps 3000",
    "murmurate tune cartpole-a2c --search": "--env-steps 1500 --trials 2",  # a field is searched once
    "murmurate tune cartpole-a2c --strategy": "--env-steps 1500 --trials 2",
    "murmurate tune cartpole-gala": "--env-steps 1500 --trials 2",
    "murmurate tune": "--env-steps 1500 --trials 2 --search agent.learning-rate=1e-4..1e-2:log",
    "sbatch": "--env-steps 3000",
    "torchrun": "--env-steps 3000",
}
NOT_RUN = {  # what a line begins with, and what it needs
    "docker": "Docker",
    "image=": "Docker and a registry",
    "kubectl": "a Kubernetes cluster",
    "sed ": "a Kubernetes cluster",
    "pip install": "a package index",
    "python3 -m venv": "an environment without packages, and a package index",
    "export MURMURATE_SECRET=...": "the reader's secret",
    "murmurate train pong-a2c --placement.devices cuda:0": "a GPU",
    "murmurate train pong-gala --replicas 4 --placement.devices cuda:0": "two GPUs",
}
PAGES = {
    *(f"how-to/{path.stem}" for path in (DOCS / "how-to").glob("*.md")),
    *("start", "tuning", "api", "simulate", "plan", "corpora", "estimator"),
}
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shorter(line: str) -> str:
    """``line`` with what shortens it, in front of a comment and of what follows the command."""
    ending = next((words for start, words in SHORTER.items() if line.startswith(start)), "")
    command = re.match(r"[^#>|&]*[^#>|&\s]", line)
    return f"{command[0]} {ending}{line[command.end() :]}" if command and ending else line


def wanted(page: str) -> list[str]:
    """The lines of a page that are commands and can run here, and not those that commands print."""
    programs = ("murmurate", "torchrun", "sbatch", "RAY_ADDRESS")
    here = [line for line in lines(DOCS / f"{page}.md") if line.startswith(programs)]
    return [shorter(line) for line in here if not line.startswith(tuple(NOT_RUN))]


def run(script: str, folder: Path, **more: str) -> str:
    command = ["bash", "-euo", "pipefail", "-c", script]
    variables = environment() | {"HOME": str(folder)} | more
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=1000)
    assert not done.returncode, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def program(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return run("python script.py", folder)


def python(page: str) -> list[str]:
    return PYTHON.findall((DOCS / f"{page}.md").read_text())


def test_each_line_of_the_shell_is_run_or_says_why_not() -> None:
    for page in sorted(PAGES):
        for line in re.findall(
            r"^(?:    )?([a-z][\w.-]*=?.*)$", "\n".join(lines(DOCS / f"{page}.md")), re.MULTILINE
        ):
            known = line.startswith(("murmurate ", "torchrun ", "sbatch ", *NOT_RUN))
            formula = page == "simulate" and line.startswith(("ring:", "tree:"))
            assert known or formula, f"{page}: {line}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_start(tmp_path: Path) -> None:
    printed = run("\n".join(wanted("start")), tmp_path)
    assert "Evaluation over 20 games" in printed
    assert (tmp_path / "runs/first/report.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", ["how-to/gpus", "tuning", "simulate", "plan"])
def test_a_page_of_commands(page: str, tmp_path: Path) -> None:
    found = wanted(page)
    assert found
    bin_folder(tmp_path)
    for line in found:
        two_hosts = line.startswith("torchrun --nnodes 2")
        printed = on_two_hosts(line, tmp_path) if two_hosts else run(line, tmp_path)
        if line.startswith("murmurate simulate") and "straggler" in line and "--replicas 8" in line:
            check_figures(page, line, printed)
    files = {"tuning": "runs/study/report.html", "plan": "plan.html"}
    assert (tmp_path / files.get(page, "")).exists()


def check_figures(page: str, line: str, printed: str) -> None:
    """What the page shows below the command is what it printed, but for the seconds and the return."""
    text = (DOCS / f"{page}.md").read_text()
    figures, end = text[text.index(f"    {line}\n") :].splitlines()[1:3]
    assert figures.strip() in printed
    assert re.match(r"\s+[\d,]+ env steps", end)[0].strip() in printed  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_reading_a_report(tmp_path: Path) -> None:
    for name in ("first", "second"):
        run(f"murmurate train cartpole-gala --env-steps 3000 --out runs/{name}", tmp_path)
    run("\n".join(wanted("how-to/reading-a-report")), tmp_path)
    assert (tmp_path / "runs/first/report.html").is_file()
    assert (tmp_path / "compare.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_start_from_a_trained_model(tmp_path: Path) -> None:
    write_folder(tmp_path / "animals", classes=3)
    write_folder(tmp_path / "flowers", classes=4)
    printed = run("\n".join(wanted("how-to/fine-tune")), tmp_path)
    assert printed.count("Evaluation over") == 2
    assert printed.count("Accuracy on 6 test images") == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_stop_and_resume(tmp_path: Path) -> None:
    """The first command is interrupted, as its comment says; the last one is run twice."""
    train, resume, spot = lines(DOCS / "how-to/resume.md")
    command = train.partition("#")[0].split()
    record = tmp_path / "runs/first/metrics.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL) as process:
        until(lambda: record.exists() and record.read_text().count("\n") > 4, "a few lines of metrics")
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == 130
    printed = run(f"{resume} --env-steps 30000", tmp_path)
    assert "Evaluation over" in printed
    assert "which has finished" in run("\n".join([shorter(spot)] * 2), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_several_hosts(tmp_path: Path) -> None:
    """As the page advises: each command twice on this host, with the endpoint there."""
    (secret, of_run, of_script) = wanted("how-to/several-hosts")
    secret = run(secret, tmp_path).strip()
    bin_folder(tmp_path)
    (tmp_path / "replicated.py").write_text(
        "import murmurate\n"
        "def main(replicator):\n    return float(replicator.sum(1.0))\n"
        "if __name__ == '__main__':\n    print(murmurate.run(main))\n"
    )
    printed = ""
    for command in (of_run, of_script):
        printed = on_two_hosts(command, tmp_path, MURMURATE_SECRET=secret)
    assert '"replicas": 4' in (tmp_path / "runs/first/summary.json").read_text()
    assert "[4.0, 4.0, 4.0, 4.0]" in printed


def on_two_hosts(command: str, folder: Path, **more: str) -> str:
    """Run ``command`` twice on this host, with the endpoint there and the programs of ``bin_folder``; returns
    what the second one printed."""
    with socket.create_server(("", 0)) as server:
        endpoint = f"localhost:{server.getsockname()[1]}"
    line = command.replace("host-a:29400", endpoint).replace("/shared/", f"{folder}/")
    assert line != command
    variables = environment() | more
    variables["PATH"] = f"{folder / 'bin'}:{variables['PATH']}"
    both = [
        subprocess.Popen(
            ["bash", "-c", line],
            env=variables, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in both:
        printed, errors = process.communicate(timeout=1000)
        assert process.returncode == 0, errors
    return printed


def bin_folder(folder: Path) -> None:
    """Stand-ins: torchrun of this Python, and Slurm's commands, on a cluster that is this host."""
    (folder / "bin").mkdir()
    batch = 'shift 2; export SLURM_SUBMIT_DIR=$PWD; exec bash "$@"'  # without its --nodes N
    for name, text in (COMMANDS | {"sbatch": batch}).items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(stat.S_IRWXU)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_slurm(tmp_path: Path) -> None:
    bin_folder(tmp_path)
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "1",
        "PORT": port,
        "RANKS": "2",
    }
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    path = f"{tmp_path / 'bin'}:{environment()['PATH']}"
    run("\n".join(wanted("how-to/slurm")), tmp_path, PATH=path, **job)
    assert (tmp_path / "runs/slurm-7/summary.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_api(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    train, simulate, load, export, watch = python("api")
    assert "runs/api" in program(tmp_path, train)
    assert "'died': " in program(tmp_path, f"import murmurate\n{simulate}")
    program(tmp_path, f"import murmurate\n{load}\n{export}")
    run("\n".join(wanted("api")), tmp_path)
    assert (tmp_path / "policy.onnx").is_file()
    assert (tmp_path / "record.parquet").is_file()
    printed = program(tmp_path, f"import murmurate\n{watch}")
    assert "saved" in printed
    assert "finished" in printed


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_corpora(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "pages")
    *_, text = found = wanted("corpora")
    run("\n".join(line for line in found if line != text), tmp_path)
    header = (tmp_path / "topics.csv").read_text().partition("\n")[0]
    assert header.startswith("name,document,topic_0,topic_1")
    assert (tmp_path / "runs/pages/topics.html").is_file()
    (tmp_path / "mine.txt").write_text("the\n")
    run(text.replace("TEXT", "pages --kind markdown"), tmp_path)
    make = """
        from murmurate.datasets.generated import generate
        from murmurate.datasets.writing import write
        made = generate(documents=12_000, vocabulary=300, topics=3, mean_length=20, seed=0)
        write(made.corpus, "docword.nytimes.txt.gz", "uci")
    """
    block, of_texts = python("corpora")
    assert program(tmp_path, of_texts).startswith("(2, ")
    printed = program(tmp_path, f"{textwrap.dedent(make)}\n{block}")
    assert re.match(r"12000 300 \d+ skipped: nothing", printed)
    assert (tmp_path / "train.ldac.gz").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_estimator(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = np.random.default_rng(0).integers(0, 90, (300, 30))
    texts = [" ".join(f"word{number}" for number in row) for row in words]
    (block,) = python("estimator")
    printed = program(tmp_path, f"texts = {texts!r}\ntest_texts = texts[:50]\n{block}")
    assert printed.startswith("(300, 50)")


def test_from_other_packages(tmp_path: Path) -> None:
    (block,) = python("how-to/from-other-packages")
    text = (
        "import torch, murmurate\n"
        "images, labels, model = torch.eye(5), torch.tensor([0, 1, 2, 0, 0]), torch.nn.Identity()\n"
        f"def main(replicator):\n{textwrap.indent(block, '    ')}\n"
        "for replicas in (1, 2):\n    murmurate.run(main, replicas=replicas, launcher='inline')\n"
    )
    assert program(tmp_path, text).count("accuracy 0.600") == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_curriculum(tmp_path: Path) -> None:
    (block,) = python("how-to/curriculum")
    printed = program(tmp_path, block)
    assert (tmp_path / "corridor-level.json").read_text() == "2"
    assert "100% of them successful" in printed
    assert "which has finished" in program(tmp_path, block)


def test_every_page_has_its_test() -> None:
    _, _, tests = Path(__file__).read_text().partition("\nPYTHON = ")
    without = {"how-to/docker", "how-to/kubernetes"}  # no line of theirs can run here
    assert not any(wanted(page) for page in without)
    assert [page for page in PAGES - without if f'"{page}' not in tests] == []
