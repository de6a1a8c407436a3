"""Sample Factory's own Atari example, after importing ale-py, which registers the games.

It is a file because the processes that Sample Factory spawns import it again.
"""

import ale_py  # noqa: F401
from sf_examples.atari.train_atari import main

if __name__ == "__main__":
    main()
