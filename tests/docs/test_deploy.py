"""The files below deploy: what can be checked without Docker, Kubernetes and Slurm."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import socket
import stat
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from murmurate.cli.options import change
from murmurate.launch import launcher
from murmurate.recipes import recipe

yaml = pytest.importorskip("yaml", reason="extra docs")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def test_the_image_copies_what_is_there_and_installs_extras_that_exist() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    copied = [line.split() for line in re.findall(r"^COPY (?!--from)(.*)", text, re.MULTILINE)]
    sources = [source for *several, _ in copied for source in several]
    assert {"pyproject.toml", "CMakeLists.txt", "src"} <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["readme"] in sources  # the build reads it
    chosen = re.search(r"^ARG EXTRAS=(\S+)", text, re.MULTILINE)
    assert chosen is not None
    extras = project["optional-dependencies"]
    assert set(chosen[1].split(",")) <= extras.keys()
    # what KubeRay runs in the pods: ``ray job submit``, and probes
    assert any(need.startswith("ray[default]") for name in chosen[1].split(",") for need in extras[name])
    assert re.search(r"apt-get install [^&]*\bwget\b", text.split("FROM")[-1])
    assert "http" not in re.sub(r"^#.*", "", text, flags=re.MULTILINE)  # no registry's address


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    claim, job = yaml.safe_load_all((DEPLOY / "rayjob.yaml").read_text())
    assert (claim["kind"], job["kind"], job["apiVersion"]) == ("PersistentVolumeClaim", "RayJob", "ray.io/v1")
    return claim, job


def test_the_manifest_agrees_with_itself() -> None:
    claim, job = manifest()
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())  # as KubeRay demands
        spec = group["template"]["spec"]
        volumes = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"]}
        (container,) = spec["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert volumes[mounts["/runs"]] == claim["metadata"]["name"]
        secrets = [entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if "valueFrom" in entry]
        assert secrets == [{"name": "murmurate-secret", "key": "secret"}]
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    assert "kubectl create secret generic murmurate-secret --from-literal=secret=" in page
    assert (
        f"image: {groups[0]['template']['spec']['containers'][0]['image']}|" in page
    )  # what its sed replaces


def test_the_manifests_command_is_one_and_its_cores_are_enough() -> None:
    _, job = manifest()
    program, verb, name, *options = shlex.split(job["spec"]["entrypoint"])
    assert (program, verb) == ("murmurate", "train")
    assert options[options.index("--out") + 1].startswith("/runs/")
    options.remove("--continue")
    fields = [word for i, word in enumerate(options) if "--out" not in (word, options[i - 1])]
    run = change(recipe(name), fields, "murmurate train")
    assert launcher(run.launcher).name == "ray"
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    cores = workers["replicas"] * int(container["resources"]["requests"]["cpu"])
    assert cores >= run.members * run.placement.threads


COMMANDS = {  # stand-ins for Slurm's: one node, and srun runs the command here; torchrun of this Python
    "scontrol": "echo localhost",
    "srun": '[ "$1" = --cpus-per-task ] || exit 9; shift 2; exec "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


def job(
    folder: Path, *words: str, stand_ins: Mapping[str, str] = COMMANDS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the batch script as Slurm would, on a cluster that is this host."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in stand_ins.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(stat.S_IRWXU)
    path = f"{commands}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1"}
    environment = {**os.environ, **slurm, "SLURM_SUBMIT_DIR": str(folder), "PATH": path, **variables}
    return subprocess.run(
        ["bash", str(DEPLOY / "slurm.sbatch"), *words],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=1000,
    )  # fmt: skip


def test_a_job_without_a_secret_says_how_to_make_one(tmp_path: Path) -> None:
    done = job(tmp_path, "cartpole-a2c", SECRET_FILE=str(tmp_path / "none"))
    assert done.returncode == 2
    assert "murmurate secret >" in done.stderr


def test_a_job_of_a_script_gives_it_to_torchrun_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(secrets.token_hex(32))
    says = COMMANDS | {"torchrun": 'echo "$OMP_NUM_THREADS $*"'}
    given = {"SECRET_FILE": str(tmp_path / "secret"), "OMP_NUM_THREADS": "3"}
    done = job(tmp_path, "--epochs", "2", stand_ins=says, SCRIPT="train.py", **given)
    assert done.stdout.startswith("3 --nnodes 1 --nproc-per-node 4 ")
    assert done.stdout.endswith(":20007 train.py --epochs 2\n")  # a port of the job's own
    shared = {"SECRET_FILE": given["SECRET_FILE"], "SLURM_CPUS_PER_TASK": "8", "RANKS": "4"}
    done = job(tmp_path, stand_ins=says, SCRIPT="train.py", OMP_NUM_THREADS="", **shared)
    assert done.stdout.startswith("2 ")  # an equal share of the cores
    done = job(tmp_path, "cartpole-a2c", stand_ins=says, OMP_NUM_THREADS="", **shared)
    assert done.stdout.startswith("1 ")
    done = job(tmp_path, "cartpole-a2c", stand_ins=says, **given)
    assert (
        f"-m murmurate train cartpole-a2c --launcher torchrun --continue --out {tmp_path}/runs" in done.stdout
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute on a machine with nothing else to do
def test_a_job_trains_and_goes_on_when_it_is_requeued(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "secret").write_text(secrets.token_hex(32))
    own = {"RANKS": "2", "SECRET_FILE": str(tmp_path / "secret"), "PORT": str(port)}
    first = job(tmp_path, "cartpole-a2c", "--env-steps", "2000", **own)
    assert first.returncode == 0, first.stderr
    folder = tmp_path / "runs" / "slurm-7"
    assert json.loads((folder / "summary.json").read_text())["env_steps"] >= 2000
    again = job(tmp_path, "cartpole-a2c", "--env-steps", "2000", **own)
    assert again.returncode == 0, again.stderr
    events = [json.loads(line).get("event") for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert "resumed" in events
