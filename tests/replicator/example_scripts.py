"""The examples' folder, and an environment in which a command can import them and the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def environment():
    here = [str(Path(__file__).parents[1]), str(EXAMPLES), *sys.path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(here), "OMP_NUM_THREADS": "1"}
