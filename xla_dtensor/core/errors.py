"""The errors of this library: what was asked for, why it is refused, what to pass instead.

Users import them from :mod:`xla_dtensor.errors`.
"""

from __future__ import annotations

from mesh_utils import MeshError

__all__ = [
    "AlreadyAnnotatedError",
    "ArgumentTypeError",
    "CheckFailedError",
    "CheckpointError",
    "CompileError",
    "DataError",
    "DistributeError",
    "FeedMismatchError",
    "ImplicitRedistributionError",
    "IndexRangeError",
    "InvalidMeshError",
    "LayoutError",
    "LocalViewError",
    "ManualRegionError",
    "MeshRankError",
    "MixedTensorsError",
    "OpShardingError",
    "ProcessGroupError",
    "ProgramMismatchError",
    "RedistributeError",
    "RngStateError",
    "RulesError",
    "RuntimeSetupError",
    "ScanError",
    "ShardDimError",
    "ShardingDroppedError",
    "UnsupportedOpError",
    "WeightsError",
    "WriteError",
    "XlaDTensorError",
]


# -------------------------------------------------------------------------- The errors of the core


class LayoutError(ValueError):
    """Placements, partition specs, aliases or layout texts that describe no layout."""


class OpShardingError(ValueError):
    """An OpSharding (or its text) that XLA would not accept, or a question it cannot answer."""


class RulesError(LayoutError):
    """Sharding rules that cannot be read, or that do not fit the model or the mesh."""


# ------------------------------------------------- The errors of xla_dtensor's torch-facing layers
#
# Each one subclasses the builtin that a PyTorch user would expect at that place, so that existing
# ``except ValueError`` clauses keep working. Messages have three parts: what was asked, why it is
# refused, what to pass instead.


class XlaDTensorError(Exception):
    """Base of all errors raised on purpose by xla_dtensor's torch-facing layers."""


class RuntimeSetupError(XlaDTensorError, RuntimeError):
    """A runtime cannot be started: missing package, started late, or started differently before."""


class DistributeError(XlaDTensorError, ValueError):
    """Wrong arguments to distribute_tensor, distribute_module, redistribute or a mesh."""


class DataError(DistributeError):
    """A batch, or a loader's state, that does not fit the mesh, the placements or the policy."""


class FeedMismatchError(XlaDTensorError, RuntimeError):
    """Processes of a job fed what cannot be parts of one global batch."""


class InvalidMeshError(MeshError, DistributeError, AssertionError):
    """Of these arguments no mesh can be made. torch_xla asserts it, so it is that error too."""


class RedistributeError(DistributeError, NotImplementedError):
    """Wrong target of a redistribute: torch's RuntimeError, and torch_xla's NotImplementedError."""


class ShardDimError(DistributeError, IndexError):
    """A tensor is to be sharded along a dim that it does not have."""


class AlreadyAnnotatedError(DistributeError, RuntimeError):
    """A tensor was told two ways to lie. A RuntimeError too, which is what torch_xla raises."""


class ArgumentTypeError(XlaDTensorError, TypeError):
    """An object of another kind than the function works on, e.g. a list in place of a tensor."""


class MeshRankError(XlaDTensorError, RuntimeError):
    """A process was asked for its one place in a mesh, and has none or several."""


class MixedTensorsError(XlaDTensorError, RuntimeError):
    """A plain tensor met a DTensor where ``implicit_replication(False)`` forbids it."""


class ProcessGroupError(XlaDTensorError, RuntimeError):
    """A process group was asked for where XLA makes the communication, and there is none."""


class CheckpointError(XlaDTensorError, RuntimeError):
    """A checkpoint cannot be written or read: the message names the file."""


class ProgramMismatchError(XlaDTensorError, RuntimeError):
    """The processes of a job are about to run different programs, and would wait for ever."""


class RngStateError(XlaDTensorError, ValueError):
    """A named random state is unknown, or would be added twice."""


class IndexRangeError(XlaDTensorError, IndexError, RuntimeError):
    """An index or a dim that a tensor lacks. torch raises an IndexError or a RuntimeError."""


class CheckFailedError(XlaDTensorError, AssertionError, ValueError, RuntimeError):
    """A check of values in a compiled step's Python failed: ``assert``, or an ``if`` that raises.

    PyTorch raises what stands there; this is caught by whoever catches the usual ones.
    """


class WriteError(XlaDTensorError, RuntimeError):
    """An in-place op or an op with out= has a result that its destination cannot hold."""


class LocalViewError(XlaDTensorError, RuntimeError):
    """A local view was mixed with a global tensor, or holds several values where one is needed."""


class ManualRegionError(XlaDTensorError, RuntimeError):
    """A manual tensor was read, mixed with a global one, or carried past its region's border."""


class ShardingDroppedError(XlaDTensorError, RuntimeError):
    """XLA did not keep a sharding that was asked for. Raised instead of a silent replication."""


class UnsupportedOpError(XlaDTensorError, NotImplementedError):
    """An operator has no lowering on the runtime in use."""


class CompileError(XlaDTensorError, RuntimeError):
    """A step cannot be compiled as one program, for example because Python reads a traced value."""


class ImplicitRedistributionError(XlaDTensorError, RuntimeError):
    """A compiled step communicates what nobody asked for. A RuntimeError too, as torch raises.

    Attributes:
        found: the collectives, the most bytes first, as ``attribution.Unasked``.
    """

    def __init__(self, message: str, found: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.found = found


class ScanError(XlaDTensorError, ValueError):
    """Layers cannot be run as one loop: they differ, write to what they share, or change type."""


class WeightsError(CheckpointError, ValueError):
    """Weights in files do not fit a module, or a file of weights is damaged."""
