"""What a step computes on ordinary CPU tensors: written down while it is traced, done before runs.

A compiled step is a program for the mesh and, beside it, what Python computes on the host: it draws
time steps, looks up a table that the caller changes, makes a mask. Baked into the program all of
that would be the first call's for ever. PyTorch computes it on every call, and so it is here::

    def step(x):                                   the tape                        the program
        t = torch.randint(1000, (8,))              randint
        noise = table[t] + 1                       index, add           ------>    input 7
        mask = torch.ones(4, 4).tril()             (made of constants) ------>     a constant
        return x + noise * mask                                                    x + i7 * c

While the step is traced, ops on plain tensors run as usual and are written down (``tape``). What of
them can come out otherwise on the next call is kept (``work``): draws, what is computed of tensors
that are older than the trace, writes to such tensors. It is done again before each run of the
program, in the order in which the step did it, and what the program is given is an input of it.

Numbers that Python reads (``t.item()``, ``table.tolist()``, a shape that depends on values) decide
what is traced. Where one comes out otherwise, everything that was done again is taken back, and the
step is traced anew.

Invariants:

* After a call, host tensors and torch's generators are as PyTorch would have left them.
* A step that raises while it is traced leaves them as they were.
* Constants cost nothing: where no draw and no write is on the tape and no older tensor has changed,
  nothing is done again.

There is no JAX here: a runtime says which tensors go into its program (:meth:`HostTape.take`).
"""

from __future__ import annotations

from xla_dtensor.runtimes.host_work.tape import HostTape
from xla_dtensor.runtimes.host_work.work import HostWork, OtherwiseError

__all__ = ["HostTape", "HostWork", "OtherwiseError"]
