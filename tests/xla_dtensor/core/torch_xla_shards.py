"""Run as a program: what torch_xla makes of partition specs. Reads JSON, writes JSON.

In: a list of {device_ids, mesh_shape, axis_names, spec, shape}. Out: for each the sharding's text
and, per device, the [start, stop] of each dim. torch_xla must not share a process with JAX here.
"""

import json
import sys
from typing import Any


def tupled(value: Any) -> Any:
    """Lists, as JSON has them, to tuples."""
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def main() -> None:
    """Answers the cases on standard input."""
    import torch_xla.runtime as xr

    xr.use_spmd()
    import numpy as np
    import torch
    import torch_xla.distributed.spmd as xs
    from torch_xla import _XLAC  # pyright: ignore[reportPrivateImportUsage]

    answers: list[dict[str, Any]] = []
    for case in json.load(sys.stdin):
        mesh = xs.Mesh(np.array(case["device_ids"]), case["mesh_shape"], tuple(case["axis_names"]))
        tensor = torch.arange(int(np.prod(case["shape"])), dtype=torch.float32)
        tensor = tensor.reshape(case["shape"]).to("xla")
        xs.mark_sharding(tensor, mesh, tupled(case["spec"]))
        text = _XLAC._get_xla_sharding_spec(tensor)
        found = _XLAC._get_local_shard_replica_and_indices([tensor])[0]
        indices = [
            [[part.start, part.stop] for part in index] if isinstance(index, list) else None
            for _, index in found
        ]
        answers.append({"text": text, "indices": indices})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
