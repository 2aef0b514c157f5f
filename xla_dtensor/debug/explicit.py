"""Refuse compiled steps that communicate what nobody asked for.

with xd.ExplicitRedistributionContext(gradients=("dp",), below_bytes=1024):
    loss = step(batch)      raises before the program runs, naming op, module, line and bytes
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any, Literal

from mesh_utils import Mesh
from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import (
    ArgumentTypeError,
    ImplicitRedistributionError,
    UnsupportedOpError,
)
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.dtensor.redistribute import last_mesh
from xla_dtensor.report.attribution import Allowance, unasked, words_of
from xla_dtensor.report.collective import COLLECTIVE_KINDS
from xla_dtensor.report.reading import read_hlo
from xla_dtensor.runtimes.registry import get_runtime
from xla_dtensor.runtimes.state import ProgramToCheck, checking

__all__ = ["ExplicitRedistributionContext"]

logger = logging.getLogger("xla_dtensor")


@argument_types
class ExplicitRedistributionContext:
    """In this context, a compiled step may communicate only what was asked for.

    PyTorch's context of this name looks at DTensor's dispatch. XLA decides later, so this one looks
    at the compiled program, its backward included, each time a compiled step is called in it. Asked
    for is what a ``redistribute`` does (``full_tensor``, the parallel styles of
    ``torch.distributed.tensor.parallel`` and ``fully_shard`` call it or count as it), what an
    annotation of a value that the step computes does (``mark_sharding``), and collectives that are
    called by name in manual regions. A collective belongs to a redistribute if it has its name in
    the program, or that of an op before it, follows axes that it changes, is of a kind that brings
    this about, and moves no more than it. :mod:`xla_dtensor.report.attribution` says it
    exactly, and where this is fooled.

    Not asked for is all the rest: a matmul over a sharded dim whose sum nobody redistributes, a
    weight that XLA gathers because the plan is wrong, the sums of a loss over its batch, and of
    gradients over the axes that the parameters do not use. Most steps want the last two::

        ExplicitRedistributionContext(gradients=("dp",), below_bytes=1024)

    Ops outside of compiled steps are not looked at, and neither is what ``torch.compile`` makes of
    a redistribute. Needs the JAX runtime: torch_xla's programs carry no names.

    Args:
        enable: False switches an outer context off.
        strict: Taken for PyTorch's signature. There it also refuses redistributions that move
            nothing; a compiled program has none.
        mode: "raise", or "warn" to log it and run.
        mesh: The mesh to name axes of; by default that of the first DTensor among the arguments, or
            of the last redistribute. Name it where steps on several meshes take no DTensors.
        kinds: Kinds of collectives that are let through, such as "all-reduce".
        modules: Paths of modules that are let through, with all that is in them.
        gradients: Axes over which gradients may be summed.
        below_bytes: Collectives that move less on one device in one step are let through.

    Raises:
        ImplicitRedistributionError: From a call of a compiled step; the step did not run.
        UnsupportedOpError: On entering, on another runtime.
        ArgumentTypeError: Another mode, or a kind that there is not.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("tp",))
        >>> x = xd.distribute_tensor(torch.ones(8, 8), mesh, [Shard(1)])
        >>> w = xd.distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
        >>> asked = xd.compile(lambda: (x @ w).redistribute(placements=[Replicate()]).relu())
        >>> with xd.ExplicitRedistributionContext():
        ...     _ = asked()
        >>> with xd.ExplicitRedistributionContext():
        ...     _ = xd.compile(lambda: (x @ w).relu())()
        Traceback (most recent call last):
        ...
        xla_dtensor.core.errors.ImplicitRedistributionError: ...
    """

    def __init__(
        self,
        enable: bool = True,
        strict: bool = False,
        mode: Literal["raise", "warn"] = "raise",
        *,
        mesh: object = None,
        kinds: tuple[str, ...] = (),
        modules: tuple[str, ...] = (),
        gradients: tuple[str, ...] = (),
        below_bytes: int = 0,
    ) -> None:
        if mode not in ("raise", "warn"):
            raise ArgumentTypeError(
                f"An ExplicitRedistributionContext was made with mode={mode!r}. It raises or "
                "warns. Pass 'raise' or 'warn'."
            )
        unknown = [kind for kind in kinds if kind not in COLLECTIVE_KINDS]
        if unknown:
            raise ArgumentTypeError(
                f"An ExplicitRedistributionContext was made with kinds={kinds}. There is no "
                f"collective {unknown[0]!r}. Pass some of {', '.join(COLLECTIVE_KINDS)}."
            )
        self._enable = enable
        self._raises = mode == "raise"
        self._mesh = None if mesh is None else as_device_mesh(mesh).value.root
        self._allowed = Allowance(tuple(kinds), tuple(modules), tuple(gradients), below_bytes)
        self._open: list[ExitStack] = []

    def __enter__(self) -> ExplicitRedistributionContext:
        runtime = get_runtime()
        if self._enable and not runtime.has_scopes:
            raise UnsupportedOpError(
                "ExplicitRedistributionContext was entered on the runtime "
                f"{runtime.name!r}. Its programs carry no names, so nobody can tell whether a "
                "collective was asked for. Use the JAX runtime, or look at comm_counts(step, mesh)."
            )
        stack = ExitStack()
        stack.enter_context(checking(self._check if self._enable else None))
        self._open.append(stack)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.pop().close()

    def _check(self, program: ProgramToCheck) -> None:
        mesh = self._mesh or _mesh_of(program.arguments)
        reading = read_hlo(program.hlo(), mesh)
        sizes: dict[str, int] = {}
        if mesh is not None:
            names = map(str, mesh.axis_names)
            sizes = dict(zip(names, mesh.mesh_shape, strict=True))
        collectives = unasked(reading.collectives, program.asked(), sizes, self._allowed)
        if not collectives:
            return
        total = sum(collective.bytes for collective in collectives)
        what = "collective" if len(collectives) == 1 else "collectives"
        message = (
            f"The compiled step {program.name} was called in an ExplicitRedistributionContext. It "
            f"runs {len(collectives)} {what} that nobody asked for, {total:,} bytes on each "
            "device: "
            f"{'; '.join(words_of(collectives))}. Call redistribute where it is meant, change the "
            "placements, or let it through with kinds, modules, gradients or below_bytes."
        )
        if self._raises:
            raise ImplicitRedistributionError(message, collectives)
        logger.warning("%s", message)


def _mesh_of(arguments: Any) -> Mesh | None:
    for leaf in arguments:
        mesh = getattr(getattr(leaf, "_spec", None), "mesh", None)
        if mesh is not None:
            return mesh.value.root
    # The step's own trace has just redistributed; a step that never does asks for nothing.
    last = last_mesh()
    if last is not None:
        return last.value.root
    from xla_dtensor.spmd.mesh import candidate_meshes

    return candidate_meshes()[0].root
