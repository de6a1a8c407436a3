"""Sample Factory's own Atari example, after a look at ale-py: importing it is what registers the games.

A file and not a command-line flag, because the processes that Sample Factory spawns import it again.
"""

import ale_py  # noqa: F401
from sf_examples.atari.train_atari import main

if __name__ == "__main__":
    main()
