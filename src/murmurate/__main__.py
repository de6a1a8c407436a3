"""``python -m murmurate`` is ``murmurate``."""

import sys

from murmurate.cli import main

sys.exit(main())
