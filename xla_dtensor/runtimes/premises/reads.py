"""What a function's code reads by name: exactly where its source is known, else coarsely.

Without a source (``python -c``, code that was made by ``exec``) only names are known: the globals
and variables around that the code names, and the attributes that it looks up of whatever. Then all
of these values count as used.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType

from xla_dtensor.runtimes.premises.chains import ARGUMENT, CELL, GLOBAL, Chain, Reads
from xla_dtensor.runtimes.premises.reader import read
from xla_dtensor.runtimes.premises.sources import inner_functions, tree_of

__all__ = ["reads_of"]

_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"})


def reads_of(code: CodeType) -> Reads:
    """Return what `code` reads, functions and comprehensions inside of it included.

    Example:
        >>> def step(self, x):
        ...     config = self.config
        ...     return x * config.scale + TABLE["bias"]
        >>> [str(chain) for chain in reads_of(step.__code__).looked_up]
        ['self', 'self.config', 'x', 'self.config.scale', 'TABLE', "TABLE['bias']"]
    """
    return _reads(code, code.co_filename)


@lru_cache(maxsize=10_000)
def _reads(code: CodeType, _: str) -> Reads:
    # Codes of two files, one of which has no source, may be equal.
    tree = tree_of(code)
    return _coarsely(code) if tree is None else read(tree, code.co_freevars)


def _coarsely(code: CodeType) -> Reads:
    found = Reads()
    codes = [code, *inner_functions(code)]
    steps = [step for each in codes for step in dis.get_instructions(each)]
    names = {step.argval for step in steps if step.opname in _GLOBALS}
    count = code.co_argcount + code.co_kwonlyargcount
    chains = [Chain(GLOBAL, name) for name in sorted(names)]
    chains += [Chain(CELL, name) for name in code.co_freevars if name != "__class__"]
    chains += [Chain(ARGUMENT, name) for name in code.co_varnames[:count]]
    found.looked_up.update(dict.fromkeys(chains))
    found.used.update(found.looked_up)
    for each in codes:
        found.attributes.update(each.co_names)
        found.attributes.update(filter(_may_be_a_name, each.co_consts))
    return found


def _may_be_a_name(constant: object) -> bool:
    return isinstance(constant, str) and constant.isidentifier()
