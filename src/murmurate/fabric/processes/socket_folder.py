"""Removes the folder of the fork server's socket when the fork server, which imports this first, ends.

The fork server ends once all processes that use it have ended, even if the launcher was killed before it had
any worker.
"""

import atexit
import os
import shutil

VARIABLE = "MURMURATE_FORK_SERVER_FOLDER"

if VARIABLE in os.environ:
    atexit.register(shutil.rmtree, os.environ.pop(VARIABLE), ignore_errors=True)
