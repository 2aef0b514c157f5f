"""Clients are installed in the main environment only, and there a missing one fails its tests."""

from __future__ import annotations

from importlib.util import find_spec

# Like the clients, torchtitan is in no other environment.
collect_ignore_glob = [] if find_spec("torchtitan") else ["test_*.py"]
