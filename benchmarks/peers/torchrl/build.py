"""Compiles torchrl's own C++ sources, which its wheel contains, for the installed torch.

The module in the wheel was built for another torch and does not load; this one replaces it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = ("pybind.cpp", "utils.cpp")  # without the CUDA tree
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")


def main() -> None:
    found = importlib.util.find_spec("torchrl")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("torchrl is not installed here: see README.md")
    package = Path(found.submodule_search_locations[0])
    target = package / f"_torchrl{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [os.environ.get("CXX", "g++"), "-O3", "-std=c++20", "-DNDEBUG", "-fPIC", "-shared"]
    command.append("-DTORCH_EXTENSION_NAME=_torchrl")
    for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"]):
        command += ["-isystem", path]
    command += [str(package / "csrc" / name) for name in SOURCES]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / target.name
        subprocess.run([*command, *LIBRARIES, "-o", str(built)], check=True)
        target.unlink(missing_ok=True)  # pip may have linked it to its cache
        shutil.copyfile(built, target)
    check = "import torch, torchrl._torchrl as built; built.SumSegmentTreeFp32(4)"
    subprocess.run([sys.executable, "-c", check], check=True)
    print(f"{target}: compiled against torch {torch.__version__}")


if __name__ == "__main__":
    main()
