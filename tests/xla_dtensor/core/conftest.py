"""Makes `layout_strategies`, beside this file, importable in the tests of the core."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
