"""What a loop of layers saves for its backward pass, as JAX's policies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.ad_checkpoint import checkpoint_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from xla_dtensor.core.errors import ScanError
from xla_dtensor.runtimes.jax.arrays import values
from xla_dtensor.runtimes.jax.compile.layers.block import BlockTrace
from xla_dtensor.runtimes.jax.compile.layers.split import names_in
from xla_dtensor.runtimes.jax.compile.trace_values import inner
from xla_dtensor.runtimes.nested import leaves
from xla_dtensor.runtimes.whole_ops import AS_SEEN, Remat

__all__ = ["Policy", "policy_of"]

_CHOSEN = "xla_dtensor.chosen"
_HOST = "pinned_host"


@dataclass(frozen=True)
class Policy:
    """A policy for one block.

    Args:
        saveable: What JAX asks of each equation.
        around_forward: A context in which the block's forward is traced.
        names: Names that the block has to give to values.
        asked: How the user wrote it.
    """

    saveable: Callable[..., Any]
    around_forward: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    names: tuple[str, ...] = ()
    asked: str = ""

    def check(self, trace: BlockTrace) -> None:
        """Raise when the block does not know a name.

        Raises:
            ScanError: A name that the block gives to nothing.
        """
        if not self.names or not trace.wanted:
            return
        names = names_in(trace)
        missing = [name for name in self.names if name not in names]
        if missing:
            raise ScanError(
                f"scan_layers was called with remat={self.asked!r}. The block gives no value the "
                f"name {missing[0]!r}; its names are {sorted(names)}. Name the value in the "
                "block's forward: x = xd.checkpoint_name(x, name)."
            )


def policy_of(remat: Remat) -> Policy:
    """Return JAX's policy.

    Raises:
        ScanError: Offloading where the devices have no host memory to offload to.
    """
    policies = jax.checkpoint_policies
    if remat.contexts is not None:
        return _selective(remat)
    if remat.kind == "save":
        chosen = policies.save_only_these_names(*remat.names)
        return Policy(chosen, names=remat.names, asked=remat.text)
    if remat.kind == "offload":
        _check_host_memory(remat)
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(remat.names),
            offload_src="device",
            offload_dst=_HOST,
        )
        return Policy(policy, names=remat.names, asked=remat.text)
    return Policy(
        {
            "none": policies.everything_saveable,
            "full": policies.nothing_saveable,
            "dots": policies.dots_saveable,
            "dots_no_batch": policies.dots_with_no_batch_dims_saveable,
        }[remat.kind]
    )


def _check_host_memory(remat: Remat) -> None:
    device = values.devices()[0]
    kinds = sorted({memory.kind for memory in device.addressable_memories()})
    if _HOST not in kinds:
        raise ScanError(
            f"scan_layers was called with remat={remat.text!r} on {device.device_kind}. Values are "
            f"offloaded to memory of kind {_HOST!r}, and this device reaches {kinds} only. Pass "
            "'save:' with the same names, or 'full'."
        )


# ---------------------------------------------------------------------- torch's selective contexts


def _selective(remat: Remat) -> Policy:
    caching = remat.contexts()[0]  # pyright: ignore[reportOptionalCall]
    choose = getattr(caching, "policy_fn", None)
    if not callable(choose):
        raise ScanError(
            f"scan_layers was called with remat={remat.text}. It returned a context of type="
            f"{type(caching).__name__}, in which no policy is found. Pass functools.partial("
            "create_selective_checkpoint_contexts, policy), or a name such as 'dots'."
        )
    return Policy(
        jax.checkpoint_policies.save_only_these_names(_CHOSEN),
        around_forward=lambda: _marking(choose),
    )


@contextlib.contextmanager
def _marking(choose: Callable[..., Any]) -> Iterator[None]:
    with _Marking(choose):
        yield


class _Marking(TorchDispatchMode):
    """Asks a policy of torch's about each op, and marks what it wants to have saved."""

    def __init__(self, choose: Callable[..., Any]) -> None:
        super().__init__()
        self._choose = choose

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return output  # a view, or what was written to
        # Whole here, these ops are others where torch's own policies were written.
        if any(self._saves(op, args, kwargs) for op in (func, *AS_SEEN.get(func, ()))):
            for leaf in leaves(output):
                _mark(leaf)
        return output

    def _saves(self, op: Any, args: Any, kwargs: Any) -> bool:
        context = SelectiveCheckpointContext(is_recompute=False)
        answer = self._choose(context, op, *args, **kwargs)
        if isinstance(answer, bool):
            return answer
        return answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def _mark(leaf: Any) -> None:
    payload = inner(leaf) if isinstance(leaf, torch.Tensor) else None
    if payload is not None and not payload._steps:
        storage = payload._storage
        storage.array = checkpoint_name(storage.array, _CHOSEN)
