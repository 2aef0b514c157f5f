"""peft's adapters for a model that lies on a mesh already.

    from xla_dtensor.integrations.peft import get_peft_model     # was: from peft import ...

    model = xd.from_pretrained(LlamaForCausalLM, name, mesh=mesh)
    model = get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))

peft makes an adapter of the size of what one device holds, since torch's tensor parallel modules
compute with that. Here a module computes with whole tensors, so adapters are whole, and lie on the
mesh as what they adapt does, but over ``fsdp`` only. A plain model is given to peft as it is, and
put on a mesh afterwards, by a trainer or ``xd.shard_module``. Merging, saving and switching
adapters are peft's own methods; a further adapter is made of whole size too::

    with whole_shapes(model, config):
        model.add_adapter("second", config)
    put_model(model, mesh)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import peft
from peft.tuners import tuners_utils
from peft.utils import save_and_load
from torch import nn

from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.dtensor.dtensor import DTensor
from xla_dtensor.dtensor.mesh import DeviceMesh
from xla_dtensor.nn.model_plan import put_model

__all__ = ["from_pretrained", "get_peft_model", "whole_shapes"]

_INITIAL = (True, False, "gaussian", "orthogonal")


def get_peft_model(model: nn.Module, peft_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what ``peft.get_peft_model`` does, for a model that may lie on a mesh.

    Args:
        model: The model.
        peft_config: The configuration of the adapters.
        *args: As peft takes them.
        **kwargs: As peft takes them.

    Returns:
        peft's model.

    Raises:
        ArgumentTypeError: ``init_lora_weights`` asks for adapters that are computed from weights.

    Example:
        >>> import peft, torch, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("fsdp", "tp"))
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 16))
        >>> model = xd.shard_module(model, mesh, {"0": "colwise"})
        >>> model = get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"]))
        >>> model.base_model.model[0].lora_A["default"].weight.shape
        torch.Size([4, 32])
    """
    return _on_mesh(peft.get_peft_model, model, peft_config, *args, **kwargs)


def from_pretrained(model: nn.Module, model_id: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what ``peft.PeftModel.from_pretrained`` does, for a model that may lie on a mesh.

    Args:
        model: The model.
        model_id: A folder with saved adapters, or a name on the hub.
        *args: As peft takes them.
        **kwargs: As peft takes them.

    Returns:
        peft's model.
    """
    return _on_mesh(peft.PeftModel.from_pretrained, model, model_id, *args, **kwargs)


@contextmanager
def whole_shapes(model: Any, peft_config: Any) -> Iterator[None]:
    """In its block peft makes adapters of whole sizes; they are not on a mesh yet.

    Args:
        model: The model, or a name; where it lies on no mesh, peft is left as it is.
        peft_config: The configuration of the adapters.

    Raises:
        ArgumentTypeError: It asks for adapters that are computed from weights on a mesh.
    """
    if _mesh_of(model) is None:
        yield
        return
    initial = getattr(peft_config, "init_lora_weights", True)
    if initial not in _INITIAL:
        raise ArgumentTypeError(
            f"Adapters with init_lora_weights={initial!r} were asked for, of a model on a mesh. "
            "They are computed from weights, into tensors that are not on the mesh yet. Make them "
            f"before the model is put on the mesh, or pass one of {', '.join(map(repr, _INITIAL))}."
        )
    # By the first peft asks whether a weight may be a DTensor, to go by its local shape then; by
    # the second it makes DTensors of torch's of what it loads.
    is_asked = mock.patch.object(tuners_utils, "_torch_supports_distributed", new=False)
    loads = mock.patch.object(
        save_and_load, "_reshard_dtensor_values_for_load", lambda model, state: state
    )
    with is_asked, loads:
        yield


def _on_mesh(make: Callable[..., Any], model: nn.Module, source: Any, *args: Any, **kw: Any) -> Any:
    mesh = _mesh_of(model)
    with whole_shapes(model, source):
        adapted = make(model, source, *args, **kw)
    return adapted if mesh is None else put_model(adapted, mesh)


def _mesh_of(model: Any) -> DeviceMesh | None:
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return next((p.device_mesh for p in parameters if isinstance(p, DTensor)), None)
