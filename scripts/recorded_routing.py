"""For benchmarks of experts on demand: the tests' :func:`replay` and :func:`routing`.

Random weights route evenly, so that nothing comes back and no cache helps; no trained model does.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.replay import replay
from tests.support.routing import routing

__all__ = ["replay", "routing"]
