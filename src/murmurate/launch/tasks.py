"""Whether srun or mpirun started this process several times, without telling torchrun's variables."""

from __future__ import annotations

import os
from collections.abc import Mapping


def starter_of_several(environment: Mapping[str, str] = os.environ) -> str | None:
    """The program that started this process as one of several tasks, and their number, in words; else None.

    A shell at a terminal of Slurm (``srun --pty``) is one process, however many tasks it has room for.
    """
    if environment.get("SLURM_STEP_ID", "").isdecimal() and "SLURM_PTY_PORT" not in environment:
        tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
        if _is_several(tasks):
            return f"srun started {tasks} tasks"
    # Open MPI's variable; that of MPICH and Intel MPI
    processes = environment.get("OMPI_COMM_WORLD_SIZE", environment.get("PMI_SIZE", ""))
    return f"mpirun started {processes} processes" if _is_several(processes) else None


def _is_several(number: str) -> bool:
    return number.isdecimal() and int(number) > 1
