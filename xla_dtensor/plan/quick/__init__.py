"""What a plan takes on each device, in seconds and on any machine: no torch, no jax, no compiler.

``estimate`` counts one plan, ``sweep`` ranks meshes.
"""
