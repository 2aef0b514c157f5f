"""The runtime on torch_xla 2.9. Kept right, not extended: torch_xla has no later release."""
