"""Bad input to DTensor's methods, compile, get_runtime and the plain values.

Rows as in test_bad_input.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import xla_dtensor as xd
from mesh_utils import MeshError
from xla_dtensor.core import LayoutError, OpShardingError
from xla_dtensor.errors import ArgumentTypeError, CompileError, DistributeError, RuntimeSetupError

R = Replicate()
MESH = xd.Mesh.arange((2, 4), ("dp", "tp"))
Row = tuple[Callable[[Any], Any], type[Exception], type[Exception], str]
TABLE: dict[str, Row] = {
    # ---------------------------------------------------------------- methods
    "redistribute_nowhere": (
        lambda s: s.d.redistribute(s.mesh),
        DistributeError,
        ValueError,
        "redistribute was called without placements. There is nothing to move to. Pass placements "
        "with one entry per axis of the mesh (dp=2, tp=4).",
    ),
    "redistribute_to_partial": (
        lambda s: s.d.redistribute(placements=[R, Partial("max")]),
        DistributeError,
        ValueError,
        "redistribute was called with Partial(max) for axis 'tp' of the mesh (dp=2, tp=4).",
    ),
    "redistribute_to_no_dim": (
        lambda s: s.d.redistribute(placements=[R, Shard(5)]),
        DistributeError,
        ValueError,
        "redistribute was called with Shard(dim=5) for axis 'tp' of the mesh (dp=2, tp=4) for a "
        "tensor with 2 dims. The dim 5 does not exist. Pass a dim from -2 to 1.",
    ),
    "redistribute_to_no_mesh": (
        lambda s: s.d.redistribute([0, 1], [R]),
        ArgumentTypeError,
        TypeError,
        "A mesh was expected, but an object of type=list was passed.",
    ),
    "grad_placements_of_full_tensor": (
        lambda s: s.d.full_tensor(grad_placements=[Partial()]),
        DistributeError,
        ValueError,
        "full_tensor was called with 1 placements=[Partial(sum)] on the mesh (dp=2, tp=4).",
    ),
    "from_local": (
        lambda s: xd.DTensor.from_local(torch.ones(4), s.mesh, [Shard(0), R]),
        DistributeError,
        ValueError,
        "one tensor for all of them would be repeated.",
    ),
    "data_of_a_plain_tensor": (
        lambda s: setattr(s.d, "data", torch.ones(8, 4)),
        DistributeError,
        ValueError,
        "A Tensor was assigned to .data of DTensor(",
    ),
    # ---------------------------------------------------------------- compile, get_runtime
    "compile_of_no_function": (
        lambda s: xd.compile(torch.ones(2)),  # pyright: ignore
        ArgumentTypeError,
        TypeError,
        "compile was called with an object of type=Tensor. A step is a function that is called "
        "with its inputs. Pass a function, or a module.",
    ),
    "hlo_before_the_first_call": (
        lambda s: xd.compile(lambda x: x).hlo(),
        CompileError,
        RuntimeError,
        "The HLO of a compiled step was asked for before its first call.",
    ),
    "reading_a_value_inside_a_step": (
        lambda s: xd.compile(lambda x: x * int(x.sum()))(s.d),
        CompileError,
        RuntimeError,
        "",
    ),
    "second_runtime": (
        lambda s: xd.get_runtime("another"),
        RuntimeSetupError,
        RuntimeError,
        "Runtime name='another' was asked for, but runtime='RUNTIME' already runs in this "
        "process. A process has one runtime, because tensors of one mean nothing to the other.",
    ),
    "options_too_late": (
        lambda s: xd.get_runtime(num_cpu_devices=4),
        RuntimeSetupError,
        RuntimeError,
        "Runtime 'RUNTIME' was asked to start with options={'num_cpu_devices': 4}, but it "
        "already runs. Options such as the number of devices are fixed when a runtime starts. Pass "
        "them on the first call of get_runtime, before the first tensor or mesh.",
    ),
    # ---------------------------------------------------------------- plain values
    "mesh_with_an_id_twice": (
        lambda s: xd.Mesh([0, 0], (2,)),
        MeshError,
        ValueError,
        "Mesh was given device_ids with the id 0 more than once. A device has one place in a mesh. "
        "Pass 2 different ids.",
    ),
    "layout_with_an_unknown_axis": (
        lambda s: xd.Layout.from_partition_spec(("ep",), MESH),
        LayoutError,
        ValueError,
        "partition_spec=('ep',) was asked for. Entry 'ep' for dim 0 is no axis of the mesh with ",
    ),
    "op_sharding_text": (
        lambda s: xd.OpSharding.parse("{devices=[2,4]}"),
        OpShardingError,
        ValueError,
        "",
    ),
    "op_sharding_of_too_few_devices": (
        lambda s: xd.OpSharding.parse("{devices=[2,2]0,1,2}"),
        OpShardingError,
        ValueError,
        "tile_dims=(2, 2) over a list of 3 devices were asked for. The tile dims hold 4 places. "
        "Pass one device per place.",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_refused_with_reason_and_way_out(name: str, check_refused: Callable[..., None]) -> None:
    check_refused(TABLE[name])
