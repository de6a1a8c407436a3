"""The command line. On Windows it ends here, with a message: its modules import what Windows lacks."""

import sys

from murmurate.errors import Refusal, check_system

try:
    check_system()
except Refusal as refusal:
    print(f"murmurate: {refusal}", file=sys.stderr)
    sys.exit(2)
