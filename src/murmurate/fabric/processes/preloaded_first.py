"""What the fork server, which imports this first, does besides forking: no garbage collection, and it removes
the folder of its socket when it ends.

The fork server ends once all processes that use it have ended, even if the launcher was killed before it had
any worker.
"""

import atexit
import gc
import os
import shutil

VARIABLE = "MURMURATE_FORK_SERVER_FOLDER"

if VARIABLE in os.environ:
    atexit.register(shutil.rmtree, os.environ.pop(VARIABLE), ignore_errors=True)
    # What it imports is no garbage: to look for some takes an eighth of the imports' time, and 0.6 s at the
    # exit; and in a worker a look at those objects would copy their pages.
    gc.disable()
    atexit.register(gc.freeze)
    os.register_at_fork(before=gc.freeze, after_in_child=gc.enable)
