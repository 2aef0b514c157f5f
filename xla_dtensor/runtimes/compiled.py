"""What a runtime makes of a step: something to call, and to ask about its programs."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch

from mesh_utils import Mesh
from xla_dtensor.errors import CompileError
from xla_dtensor.report.evidence import Evidence

__all__ = ["CompiledStep"]


class CompiledStep(ABC):
    """A Python step that runs as one XLA program. Call it like the function it was made from.

    Attributes:
        _step: The function.
    """

    _step: Callable[..., Any]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Be a method where a class has it, as the function itself would be."""
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy what holds the step: a copy has the function and makes programs of its own."""
        return _compiled_again, (self._step,)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, tracing and compiling it first where needed."""

    @abstractmethod
    def hlo(self) -> str:
        """Return the partitioned, optimised HLO text of the program used last."""

    @abstractmethod
    def stats(self) -> Mapping[str, Any]:
        """Return counts: calls, traces, and the reason of each trace."""

    @abstractmethod
    def metrics(self, tokens_per_step: int | None = None) -> Mapping[str, float | None]:
        """Return how fast the step goes, over its last 100 calls.

        Args:
            tokens_per_step: Tokens per call; by default the size of the largest tensor of integers
                among the arguments.

        Returns:
            "step_seconds", the median time from one call to the next; "tokens_per_second";
            "flops_per_step" and "flops_per_second", the floating-point operations of matrix
            products and convolutions on all devices together; "mfu", the latter as a fraction of
            what the devices can do in bfloat16. None for what is not known (yet).

        Raises:
            CompileError: The step was not called yet.
        """

    def evidence(
        self, mesh: Mesh, models: Sequence[torch.nn.Module] = (), **facts: Any
    ) -> Evidence:
        """Return what the program used last leaves behind, for a report.

        Args:
            mesh: The mesh to name axes of; its root lists the program's devices.
            models: Modules, by whose paths tensors are named where the runtime can tell them.
            **facts: What else the evidence says, ``title`` among it.

        Returns:
            The evidence: the program's text, and what else this runtime knows of it.

        Raises:
            CompileError: The step was not called yet.
        """
        return Evidence(hlo_text=self.hlo(), mesh=mesh.root, **facts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the programs compiled so far to a file, for `load` in another process.

        Args:
            path: The file; one that is there is replaced.

        Raises:
            CompileError: There is no program yet, or this runtime cannot write programs.
        """
        raise CompileError(
            f"A compiled step was asked to save its programs to path={os.fspath(path)!r}. "
            f"{type(self).__name__} cannot write them. Use the runtime's compile cache instead."
        )

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read programs that `save` wrote; a call whose trace is one of theirs is not compiled.

        Load only files that you trust: they contain code.

        Args:
            path: The file.

        Raises:
            CompileError: It is no such file, or was written on other devices.
        """
        raise CompileError(
            f"A compiled step was asked to load programs from path={os.fspath(path)!r}. "
            f"{type(self).__name__} cannot read them. Use the runtime's compile cache instead."
        )


def _compiled_again(step: Callable[..., Any]) -> Any:
    from xla_dtensor.runtimes.registry import get_runtime

    return get_runtime().compile(step)
