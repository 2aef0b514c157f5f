"""The runtime on JAX. Its folders, each on those before it: arrays, lower, eager, compile."""
