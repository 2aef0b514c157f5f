"""Bad input to init_device_mesh, distribute_tensor and distribute_module.

An error of the right type, in three parts, never an abort. Each row: the call, the error, the
builtin that it also is, and its text (RUNTIME stands for the runtime's name).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import xla_dtensor as xd
from mesh_utils import AxisError, MeshError
from xla_dtensor.core import LayoutError
from xla_dtensor.dtensor.mesh import as_device_mesh
from xla_dtensor.errors import ArgumentTypeError, DistributeError, MeshRankError

R = Replicate()
Row = tuple[Callable[[Any], Any], type[Exception], type[Exception], str]
TABLE: dict[str, Row] = {
    # ---------------------------------------------------------------- init_device_mesh
    "device_type": (
        lambda s: xd.init_device_mesh("cuda", (8,)),
        DistributeError,
        ValueError,
        "init_device_mesh was called with device_type='cuda'. xla_dtensor places tensors on its "
        "runtime's devices only. Pass 'xla', or use torch.distributed.device_mesh.init_device_mesh "
        "for that device type.",
    ),
    "too_many_devices": (
        lambda s: xd.init_device_mesh("xla", (4, 4)),
        DistributeError,
        ValueError,
        "init_device_mesh was called with mesh_shape=(4, 4), which takes 16 devices. The runtime "
        "'RUNTIME' has 8. Pass a smaller shape, or on CPU start with get_runtime('RUNTIME', "
        "num_cpu_devices=16).",
    ),
    "mesh_shape_zero": (
        lambda s: xd.init_device_mesh("xla", (0, 8)),
        MeshError,
        ValueError,
        "mesh_shape=(0, 8)",
    ),
    "mesh_shape_negative": (
        lambda s: xd.init_device_mesh("xla", (-2, -4)),
        MeshError,
        ValueError,
        "mesh_shape=(-2, -4)",
    ),
    "mesh_shape_text": (
        lambda s: xd.init_device_mesh("xla", "24"),  # pyright: ignore
        MeshError,
        ValueError,
        "mesh_shape='24'",
    ),
    "mesh_shape_number": (
        lambda s: xd.init_device_mesh("xla", 8),  # pyright: ignore
        MeshError,
        ValueError,
        "mesh_shape=8",
    ),
    "mesh_shape_fraction": (
        lambda s: xd.init_device_mesh("xla", (2.0, 4.0)),  # pyright: ignore
        MeshError,
        ValueError,
        "mesh_shape=(2.0, 4.0)",
    ),
    "axis_names_too_few": (
        lambda s: xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp",)),
        MeshError,
        ValueError,
        "axis_names=('dp',)",
    ),
    "axis_names_twice": (
        lambda s: xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "dp")),
        MeshError,
        ValueError,
        "axis_names=('dp', 'dp')",
    ),
    "unknown_axis": (
        lambda s: s.mesh["ep"],
        AxisError,
        ValueError,
        "'ep'",
    ),
    "local_rank_of_two_axes": (
        lambda s: s.mesh.get_local_rank(),
        MeshRankError,
        RuntimeError,
        "get_local_rank() was called on a mesh with axes (dp=2, tp=4). It has 2 axes, so the "
        "question has 2 answers. Pass mesh_dim, an axis name or number.",
    ),
    "no_mesh_at_all": (
        lambda s: as_device_mesh("xla"),  # pyright: ignore
        ArgumentTypeError,
        TypeError,
        "A mesh was expected, but an object of type=str was passed. Axes and devices cannot be "
        "read from it. Pass init_device_mesh('xla', ...) or a mesh_utils.Mesh.",
    ),
    # ---------------------------------------------------------------- distribute_tensor
    "no_mesh": (
        lambda s: xd.distribute_tensor(torch.ones(8)),
        DistributeError,
        ValueError,
        "distribute_tensor was called without a mesh. No mesh was passed and no `with mesh:` block "
        "is open. Pass device_mesh=, or call it inside `with init_device_mesh('xla', ...):`.",
    ),
    "mesh_of_unknown_devices": (
        lambda s: xd.distribute_tensor(torch.ones(8), xd.Mesh(range(8, 16), (8,)), [Shard(0)]),
        DistributeError,
        ValueError,
        "",
    ),
    "no_tensor": (
        lambda s: xd.distribute_tensor([1.0, 2.0], s.mesh),  # pyright: ignore
        ArgumentTypeError,
        TypeError,
        "distribute_tensor was called with an object of type=list. Only a tensor can be put on a "
        "mesh. Pass torch.as_tensor(value).",
    ),
    "too_few_placements": (
        lambda s: s.put(Shard(0)),
        DistributeError,
        ValueError,
        "distribute_tensor was called with 1 placements=[Shard(dim=0)] on the mesh (dp=2, tp=4). "
        "There is one placement per mesh axis, 2 in all, whatever the tensor's dims. Pass 2 "
        "placements; Replicate() leaves an axis out.",
    ),
    "too_many_placements": (
        lambda s: s.put(R, R, R),
        DistributeError,
        ValueError,
        "distribute_tensor was called with 3 placements=[Replicate(), Replicate(), Replicate()] on",
    ),
    "no_placements": (
        lambda s: s.put(),
        DistributeError,
        ValueError,
        "distribute_tensor was called with 0 placements=[] on the mesh (dp=2, tp=4).",
    ),
    "one_placement": (
        lambda s: xd.distribute_tensor(torch.ones(8), s.mesh, Shard(0)),  # pyright: ignore
        DistributeError,
        ValueError,
        "distribute_tensor was called with placements=Shard(dim=0). Placements are a sequence with "
        "one entry per axis of the mesh (dp=2, tp=4). Pass a list, e.g. [Replicate(), "
        "Replicate()].",
    ),
    "one_alias": (
        lambda s: xd.distribute_tensor(torch.ones(8), s.mesh, "dp"),
        DistributeError,
        ValueError,
        "distribute_tensor was called with placements='dp'.",
    ),
    "number_for_placements": (
        lambda s: xd.distribute_tensor(torch.ones(8), s.mesh, 0),  # pyright: ignore
        DistributeError,
        ValueError,
        "distribute_tensor was called with placements=0.",
    ),
    "partial": (
        lambda s: s.put(Partial(), R),
        DistributeError,
        ValueError,
        "distribute_tensor was called with Partial(sum) for axis 'dp' of the mesh (dp=2, tp=4). "
        "Partial says that a reduction is still pending, which no annotation can bring about for a "
        "value that is already whole. Pass Shard(dim) or Replicate().",
    ),
    "dim_too_large": (
        lambda s: s.put(R, Shard(2)),
        DistributeError,
        ValueError,
        "distribute_tensor was called with Shard(dim=2) for axis 'tp' of the mesh (dp=2, tp=4) for "
        "a tensor with 2 dims. The dim 2 does not exist. Pass a dim from -2 to 1.",
    ),
    "dim_too_small": (
        lambda s: s.put(R, Shard(-3)),
        DistributeError,
        ValueError,
        "distribute_tensor was called with Shard(dim=-3) for axis 'tp' of the mesh (dp=2, tp=4)",
    ),
    "scalar": (
        lambda s: s.put(Shard(0), R, shape=()),
        DistributeError,
        ValueError,
        "distribute_tensor was called with Shard(dim=0) for axis 'dp' of the mesh (dp=2, tp=4) for "
        "a tensor without dims. A scalar cannot be split. Pass Replicate().",
    ),
    "placement_and_alias": (
        lambda s: s.put(Shard(0), "tp"),
        DistributeError,
        ValueError,
        "distribute_tensor was called with 'tp' for axis 'tp' of the mesh (dp=2, tp=4). Each entry "
        "has to be a placement, and aliases and placements cannot be mixed. Pass Shard(dim), "
        "Replicate() or Partial().",
    ),
    "stride_of_no_tiling": (
        lambda s: s.put(_StridedShard(0, split_factor=3), R, shape=(12, 2)),
        LayoutError,
        ValueError,
        "",
    ),
    "unknown_alias": (
        lambda s: xd.distribute_tensor(torch.ones(8, 4), s.mesh, ("ep", None)),
        LayoutError,
        ValueError,
        "placements=('ep', None) were asked for as aliases. 'ep' is no axis of the mesh with ",
    ),
    "alias_twice": (
        lambda s: xd.distribute_tensor(torch.ones(8, 4), s.mesh, ("dp", "dp")),
        LayoutError,
        ValueError,
        "",
    ),
    "alias_of_another_rank": (
        lambda s: xd.distribute_tensor(torch.ones(8, 4), s.mesh, ("dp", None, None)),
        DistributeError,
        ValueError,
        "distribute_tensor was called with alias placements=('dp', None, None) for a tensor with "
        "2 dims. Aliases name the mesh axes of each tensor dim, so there is one entry per dim. "
        "Pass 2 entries; None leaves a dim whole.",
    ),
    "numbers_for_aliases": (
        lambda s: xd.distribute_tensor(torch.ones(8, 4), s.mesh, (0, 1)),
        LayoutError,
        ValueError,
        "placements=(0, 1) were asked for as aliases. 0, of type int, is not the name of an axis.",
    ),
    "sparse": (
        lambda s: xd.distribute_tensor(torch.eye(8).to_sparse(), s.mesh),
        DistributeError,
        ValueError,
        "distribute_tensor was called with a tensor on device=cpu, layout=torch.sparse_coo. Values "
        "are taken from dense host memory. Pass tensor.cpu(), or tensor.to_dense().",
    ),
    "autograd_history": (
        lambda s: xd.distribute_tensor(torch.ones(8, requires_grad=True) * 2, s.mesh),
        DistributeError,
        ValueError,
        "distribute_tensor was called with a tensor of shape=(8,) that has an autograd history. "
        "Its gradient would end at the copy, in silence. Pass a leaf tensor, or tensor.detach().",
    ),
    "lies_otherwise": (
        lambda s: xd.distribute_tensor(s.d, s.mesh, [R, R]),
        DistributeError,
        ValueError,
        "distribute_tensor was called with DTensor(shape=(8, 4), dtype=float32, placements=(S(0), "
        "R), mesh=(dp=2, tp=4), local_shape=(4, 4)) and placements=[Replicate(), Replicate()] on "
        "the mesh (dp=2, tp=4). It lies on a mesh already, otherwise than asked. Call "
        "tensor.redistribute(mesh, placements) to move it.",
    ),
    # ---------------------------------------------------------------- distribute_module
    "no_module": (
        lambda s: xd.distribute_module(torch.ones(2), s.mesh),  # pyright: ignore
        ArgumentTypeError,
        TypeError,
        "distribute_module was called with an object of type=Tensor. Only a torch.nn.Module has "
        "parameters and buffers. Pass a module, or use distribute_tensor.",
    ),
    "module_without_mesh": (
        lambda s: xd.distribute_module(nn.Linear(2, 2)),
        DistributeError,
        ValueError,
        "distribute_module was called without a mesh.",
    ),
    "module_twice": (
        lambda s: xd.distribute_module(xd.distribute_module(nn.Linear(2, 2), s.mesh), s.mesh),
        DistributeError,
        ValueError,
        "distribute_module was called on a Linear that it was called on before. Its parameters lie "
        "on a mesh already, and its hooks would run twice. Call it once per module; move single "
        "parameters with redistribute.",
    ),
    "hook_with_one_argument": (
        lambda s: xd.distribute_module(nn.Linear(2, 2), s.mesh, input_fn=lambda inputs: inputs),
        DistributeError,
        ValueError,
        "distribute_module was called with an input_fn that takes 1 arguments. It is called with "
        "three: the module, the inputs and the mesh. Pass a function (module, inputs, "
        "device_mesh).",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_refused_with_reason_and_way_out(name: str, check_refused: Callable[..., None]) -> None:
    check_refused(TABLE[name])


def test_the_table_is_long_and_holds_whole_messages(count_sentences: Callable[[str], int]) -> None:
    assert len(TABLE) >= 30
    assert sum(count_sentences(text) >= 3 for _, _, _, text in TABLE.values()) >= 15


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two.", 2),
        ("A=[0.5, 1]. B 'x.y' c. Pass d.", 3),
        ("No end", 0),
        ("torch.x() y. Z.", 2),
    ],
)
def test_sentences_are_counted(
    text: str, count: int, count_sentences: Callable[[str], int]
) -> None:
    assert count_sentences(text) == count


def test_a_message_in_two_parts_is_noticed(check_refused: Callable[..., None]) -> None:
    def refuse(_: Any) -> None:
        raise ValueError("This was asked. That is wrong.")

    with pytest.raises(AssertionError, match="This was asked"):
        check_refused((refuse, ValueError, ValueError, "This was asked."))
