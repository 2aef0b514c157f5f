"""What a plan takes on each device, in seconds and on any machine: no torch, no jax, no compiler.

:mod:`~xla_dtensor.quick.estimate` counts one plan, :mod:`~xla_dtensor.quick.sweep` ranks meshes.
"""
