"""Utilisation and power of a GPU, as a program called nvidia-smi reports them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from murmurate.bench import _gpu
from waiting import until

# reports the power of the GPU that it is asked for; then it waits to be ended, like ``nvidia-smi --loop-ms``
_SMI = """#!/bin/sh
for word in "$@"; do case $word in --id=*) gpu=${word#--id=};; esac; done
case $gpu in GPU-22*) echo "37, 71.20"; echo "[N/A], 70.00"; echo "40, 80.00";; *) echo "0, 9.00";; esac
touch "$0.has_printed"
exec sleep 1000
"""


def test_the_gpu_that_torch_sees_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    properties = {0: SimpleNamespace(uuid="22aa-bb")}  # of the second GPU, where CUDA_VISIBLE_DEVICES is 1
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    with _gpu.sampled(_gpu.first_gpu()) as samples:
        until((tmp_path / "nvidia-smi.has_printed").exists)
    assert samples == [(37.0, 71.2), (40.0, 80.0)]


def test_without_nvidia_smi_there_are_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with _gpu.sampled("0") as samples:
        pass
    assert samples == []
