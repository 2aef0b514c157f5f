"""Guards: what a step read of Python while it was traced, and whether it still holds.

A traced program has in it for good what Python held during the trace. `Recording` notes what the
step really reads while it runs (``recording``), `Guards` compare that with what there is on each
later call (``comparing``)::

    model.config.scale = 2.0
    step(x)                            reads model, model.config, its scale
    model.config.epoch += 1            nobody read it: the program holds
    model.config.scale = 3.0           "LlamaConfig.scale changed from 2.0 to 3.0": traced anew

Invariants:

* A change that alters what the step does breaks a guard.
* A change of what the step did not read breaks none.
"""

from xla_dtensor.runtimes.guards.comparing import Guards
from xla_dtensor.runtimes.guards.recording import Recording, off_the_record

__all__ = ["Guards", "Recording", "off_the_record"]
