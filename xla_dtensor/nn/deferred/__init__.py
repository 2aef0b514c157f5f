"""materialize: a model built without values gets them, each device its own part.

    with torch.device("meta"):
        model = Model()                              shapes only
    shard_module(model, mesh, rules)                 or distribute_module, or fully_shard
    materialize(model, seed=0)                       the values, where they lie

The values are those of an initialisation that was not sharded, and no host or device holds more
than its part of the model and the parameter being made. `rng` says which random numbers:

==========  =======================================  ============================================
rng         equal to, bit by bit                     cost
==========  =======================================  ============================================
"device"    the same initialisation of DTensors on   each device draws its part
            one device, any other mesh, any number
            of processes
"torch"     ``torch.manual_seed(seed); Model()``     every process draws the whole model, a few
            on one CPU                               MB at a time
==========  =======================================  ============================================
"""

from __future__ import annotations

from xla_dtensor.nn.deferred.materialization import materialize

__all__ = ["materialize"]
