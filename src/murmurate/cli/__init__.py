"""The command line. On Windows it ends here, in a sentence: its modules import what is not there."""

import sys

from murmurate.errors import Refusal, check_system

try:
    check_system()
except Refusal as refusal:
    print(f"murmurate: {refusal}", file=sys.stderr)
    sys.exit(2)
