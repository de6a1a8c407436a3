"""``python -m murmurate`` is ``murmurate``."""

import sys

from murmurate.cli.main import main

sys.exit(main())
