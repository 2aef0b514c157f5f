"""A program for a process of its own: what torch_xla 2.9's annotation API answers, as JSON."""

import inspect
import json

import numpy as np
import torch
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.spmd.debugging as debugging
import torch_xla.runtime as xr

CASES = [
    # shape, device ids, mesh shape, partition spec
    ((16, 8), range(8), (2, 4), (0, 1)),
    ((16, 8), range(8), (2, 4), (1, 0)),
    ((16, 8), range(8), (2, 4), (0, None)),
    ((16, 8), range(8), (2, 4), (None, 1)),
    ((16, 8), range(8), (2, 4), (None, None)),
    ((16, 8), range(8), (2, 4), ((0, 1), None)),
    ((16, 8), range(8), (2, 4), ((1, 0), None)),
    ((10, 7), range(8), (4, 2), (0, None)),
    ((10, 7), range(8), (4, 2), (0, 1)),
    ((3,), range(8), (4, 2), (0,)),
    ((10,), range(8), (8,), (0,)),
    ((8, 8), [0, 4, 1, 5, 2, 6, 3, 7], (4, 2), (0, 1)),
    ((8, 8), [0, 4, 1, 5, 2, 6, 3, 7], (4, 2), (None, 0)),
    ((4, 6, 8), range(8), (2, 2, 2), (2, None, 0)),
    ((4, 6, 8), range(8), (2, 2, 2), (None, (0, 2), 1)),
    ((8, 4), range(8), (8, 1), (0, 1)),
    ((), range(8), (2, 4), ()),
]

CLASSES = ("Mesh", "HybridMesh", "ShardingSpec", "XLAShard", "XLAShardedTensor")


def parameters(function):
    return [
        [p.name, p.kind.name, None if p.default is p.empty else repr(p.default)]
        for p in inspect.signature(function).parameters.values()
    ]


def methods(cls):
    own = {n: f for n, f in vars(cls).items() if not n.startswith("_")}
    return {n: parameters(f) for n, f in own.items() if inspect.isfunction(f)}


def shards(shape, ids, mesh_shape, spec):
    tensor = torch.arange(float(np.prod(shape))).reshape(shape).to("xla")
    marked = xs.mark_sharding(tensor, xs.Mesh(np.array(ids), mesh_shape), spec)
    return {
        "case": [shape, list(ids), mesh_shape, spec],
        "spec": marked.sharding_spec,
        "type": int(marked.sharding_type),
        "shards": [
            [
                shard.shard_device,
                None if shard.indices is ... else [[s.start, s.stop] for s in shard.indices],
                shard.replica_id,
                shard.data.tolist(),
                shard.unpadded_data.tolist(),
            ]
            for shard in marked.local_shards
        ],
    }


def main():
    xr.use_spmd()
    functions = {n: f for n, f in vars(xs).items() if inspect.isfunction(f)}
    functions |= {n: getattr(debugging, n) for n in dir(debugging) if n.startswith("visualize")}
    answers = {
        "names": sorted(n for n in vars(xs) if not inspect.ismodule(getattr(xs, n))),
        "functions": {n: parameters(f) for n, f in functions.items()},
        "constructors": {n: parameters(getattr(xs, n)) for n in CLASSES},
        "methods": {n: methods(getattr(xs, n)) for n in CLASSES},
        "types": {t.name: t.value for t in xs.ShardingType},
        "shards": [shards(*case) for case in CASES],
        "mesh": str(xs.Mesh(list(range(8)), (2, 4), ("dp", "tp"))),
    }
    print(json.dumps(answers))


main()
