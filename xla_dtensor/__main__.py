"""``python -m xla_dtensor``: see `cli`."""

from __future__ import annotations

import sys

from xla_dtensor.cli import main

if __name__ == "__main__":
    sys.exit(main())
