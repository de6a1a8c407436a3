"""Imported first by the fork server: removes the folder of its socket when it ends.

That is once all processes that use it have ended, also where the launcher was killed before it had a worker.
"""

import atexit
import os
import shutil

VARIABLE = "MURMURATE_FORK_SERVER_FOLDER"

if VARIABLE in os.environ:
    atexit.register(shutil.rmtree, os.environ.pop(VARIABLE), ignore_errors=True)
