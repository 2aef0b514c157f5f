"""Evidence of a step on the JAX runtime, whether its machine is here or not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesh_utils import Mesh
from xla_dtensor.report.evidence import CompilerMemory, Evidence, Held
from xla_dtensor.runtimes.jax_convert import x64
from xla_dtensor.runtimes.jax_executables import Executables
from xla_dtensor.runtimes.jax_flops import flops_of, product_dtypes
from xla_dtensor.runtimes.jax_inventory import Names, hlo_dtype, inventory
from xla_dtensor.runtimes.jax_program import Program
from xla_dtensor.runtimes.jax_tensor import Storage

__all__ = ["Traced", "memory_of"]


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced step and the names of what it holds.

    Attributes:
        program: The trace.
        names: Who owns what.
        arguments: The storages of the step's tensor arguments; None for those that are forgotten.
        root: The mesh that layouts are said on.
    """

    program: Program
    names: Names
    arguments: Sequence[Storage | None]
    root: Mesh

    def lowered(self) -> Any:
        """Return the program as XLA is given it: ``jax.stages.Lowered``."""
        with x64():
            return self.program.blueprint.lowered(*self.program.blueprint.inputs)

    def compiled(self, lowered: Any) -> Any:
        """Return what the devices' compiler makes of it: ``jax.stages.Compiled``."""
        with x64():
            return lowered.compile()

    def evidence(self, compiled: Any, **facts: Any) -> Evidence:
        """Return what is left of the step once it is compiled.

        Args:
            compiled: ``jax.stages.Compiled``.
            **facts: What else the evidence says: title, topology, seconds, versions, ...
        """
        jaxpr = self.program.blueprint.jaxpr
        return Evidence(
            hlo_text=compiled.as_text(),
            mesh=self.root,
            held=self.held(compiled),
            memory=memory_of(compiled),
            flops=float(flops_of(jaxpr)),
            compute_dtype=_narrowest(product_dtypes(jaxpr)),
            **facts,
        )

    def save(self, lowered: Any, compiled: Any, path: str | os.PathLike[str]) -> None:
        """Write the compiled program to a file that ``CompiledStep.load`` takes."""
        keep = Executables()
        keep.add(lowered, compiled)
        keep.save(path)

    def held(self, executable: Any) -> tuple[Held, ...]:
        """Return what goes in and comes out."""
        return inventory(self.program, executable, self.names, self.arguments, self.root)


def memory_of(executable: Any) -> CompilerMemory | None:
    """Return what the compiler says that a program takes on one device; None if it does not."""
    said = executable.memory_analysis()
    if said is None:
        return None
    return CompilerMemory(
        arguments=said.argument_size_in_bytes,
        results=said.output_size_in_bytes,
        aliased=said.alias_size_in_bytes,
        temporaries=said.temp_size_in_bytes,
        code=said.generated_code_size_in_bytes,
    )


def _narrowest(dtypes: frozenset[str]) -> str:
    """The dtype whose peak a step is held to: the one with the highest."""
    widths = {name: int("".join(filter(str.isdigit, name.split("_")[0])) or 64) for name in dtypes}
    return hlo_dtype(min(widths, key=lambda name: (widths[name], name), default="float32"))
