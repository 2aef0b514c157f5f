"""JAX tensors as torch sees them, and how an op on them runs: checked, by its lowering, cached."""
