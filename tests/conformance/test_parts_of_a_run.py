"""The conformance tests of learners, sources, evaluations and worlds, on images of known data sets too."""

from __future__ import annotations

import smallest  # noqa: F401 - adds these
from murmurate.conformance.test_configs import *  # noqa: F403 - the tests
from murmurate.conformance.test_recipes import *  # noqa: F403
from murmurate.conformance.test_worlds import *  # noqa: F403
