"""Runs every op that PyTorch tests itself with, on DTensors, and says which are right.

    python -m tools.op_sweep --runtime jax --ops add,matmul --seed 0 --samples 3

takes ops of ``torch.testing``'s ``op_db`` with its sample inputs, gives each tensor random
placements on a (dp=2, tp=4) mesh of 8 virtual CPU devices, and compares values and gradients with
plain torch on the CPU. Each op is *right*, *refused* (with an error of this project), *raised*
(another error), *wrong*, or *skipped* (nothing to run, with the reason).

| module | |
|---|---|
| `samples` | which ops and inputs |
| `compare` | when values are equal |
| `judge` | one op: forward, backward, outcome |
| `child` | a process that judges ops and notes each one in a file |
| `parent` | starts children until every op is noted, whatever ends them |
| `tables` | the notes as Markdown and JSON |
"""
