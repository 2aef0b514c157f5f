"""Keep torch_xla's "openxla" back end of torch.compile from baking inputs into its graphs.

It finds out which input of a graph is which by ids that it expects in the inputs' device data. In
SPMD mode, device data that was used before may have another id. torch_xla 2.9 then takes the input
for a constant: a compiled backward goes on using the activations of the first step, in silence.
Here a graph is extracted with copies of its inputs, whose device data is their own.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from xla_dtensor.errors import CompileError
from xla_dtensor.runtimes.torch_xla_dynamo_stacks import on_stacks
from xla_dtensor.runtimes.torch_xla_sharding import (
    cut_unevenly,
    parse_annotation,
    to_annotation,
    xlac,
)

__all__ = ["correct_bridge"]


def correct_bridge() -> None:
    """Correct the bridge between Dynamo and torch_xla; calling it again does nothing."""
    bridge: Any = importlib.import_module("torch_xla._dynamo.dynamo_bridge")
    extract = bridge.extract_graph_helper
    if getattr(extract, "_takes_copies", False):
        return

    def extract_with_copies(model: Any, known: Any) -> Any:
        importlib.import_module("torch_xla").sync(reset_scope=False)
        xlac()._xla_wait_device_ops([])
        given = model.xla_args
        model.xla_args = tuple(map(_with_own_data, given))
        try:
            return extract(model, known)
        finally:
            model.xla_args = given

    extract_with_copies._takes_copies = True  # pyright: ignore[reportFunctionMemberAccess]
    bridge.extract_graph_helper = extract_with_copies
    _take_locals(bridge)


def _take_locals(bridge: Any) -> None:
    """Let graphs, and the parts that the bridge cuts them into, take and return local payloads."""
    whole, part = bridge.extract_compiled_graph, bridge.extract_internal

    def extract_whole(model: Any, args: Any) -> Any:
        return on_stacks(model, args, whole)

    def extract_part(model: Any) -> Any:
        def compile_part(model: Any, args: Any) -> Any:
            model.xla_args = args
            return part(model)

        return on_stacks(model, model.xla_args, compile_part)

    bridge.extract_compiled_graph, bridge.extract_internal = extract_whole, extract_part
    names: Any = importlib.import_module("torch_xla.core.dynamo_bridge")
    names.extract_compiled_graph = extract_whole


def _with_own_data(value: Any) -> Any:
    """Return a tensor with the same values and sharding, and device data of its own.

    Raises:
        CompileError: It is cut unevenly.
    """
    if not isinstance(value, torch.Tensor) or value.device.type != "xla" or not value.numel():
        return value
    sharding = parse_annotation(xlac()._get_xla_sharding_spec(value) or "")
    if sharding.is_tiled and cut_unevenly(value, sharding):
        raise CompileError(
            f"A graph with an input of shape={tuple(value.shape)}, cut unevenly by {sharding}, was "
            "given to torch_xla's back end 'openxla'. It may take the input for a constant, and a "
            "copy of it comes out replicated. Pad it, or pass backend='aot_eager'."
        )
    with torch.no_grad():
        copied = value.detach().clone()
    # A clone is the same node of the graph; this makes a new one.
    xlac()._xla_annotate_custom_sharding(copied, to_annotation(sharding))
    return copied
