"""Run by ``test_module_process``: writes what it was sent to the descriptor that it inherits, and ends."""

from __future__ import annotations

import os
import pickle
import sys


def main() -> None:
    descriptor, code = pickle.load(sys.stdin.buffer)
    seen = {"environment": os.environ.get("SEEN"), "forked": "torch" in sys.modules, "pid": os.getpid()}
    os.write(descriptor, pickle.dumps(seen))
    print("it was here", file=sys.stderr, flush=True)
    if code is None:
        sys.stdin.buffer.read()  # until the other end is closed
    sys.exit(code)


if __name__ == "__main__":
    main()
