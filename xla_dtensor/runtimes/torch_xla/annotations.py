"""torch_xla itself: how it is started, and an OpSharding as it is told of one.

torch_xla reads its environment when its client starts, once. It decides once more, at the first
tensor or device, whether the process is SPMD. From then on it is too late: asking for SPMD
afterwards ends in a crash or in programs for one device. All of this is checked before anything
is touched.

What is set, and why:

* ``PJRT_DEVICE=CPU`` and ``CPU_NUM_DEVICES``, only where virtual CPU devices were asked for.
* ``XLA_DISABLE_FUNCTIONALIZATION=1``. torch_xla otherwise wraps every tensor for
  functionalization, whose dispatch key runs before ``__torch_dispatch__``: an op on a DTensor and
  a plain XLA tensor (a causal mask, ``torch.arange(..., device=x.device)``) then returns something
  that is no DTensor. Payloads are functionalized one by one instead, see `payload`.
* ``NPROC``, only while the client starts, and only with more virtual devices than cores: the
  client makes that many threads, and a collective needs one per device.
* ``XLA_FLAGS``: the HLO, where it was asked for; and that a maximum on the CPU is NaN where one of
  the two is. XLA's faster way, which is its default there, takes the other: ``clamp`` of NaN is a
  number then.
* ``torch.autograd.set_multithreading_enabled(False)``, for the thread that starts the runtime: the
  backward pass of XLA tensors runs in the thread that asks for it. Where host tensors take part,
  PyTorch runs it in two, one of which reads values while the other records ops; torch_xla guards
  neither, and a tensor that a read was about to replace fails with "Check failed:
  data()->tensor_data".
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xla_dtensor.core import OpSharding
from xla_dtensor.core.errors import DistributeError, RuntimeSetupError
from xla_dtensor.runtimes.registry import cache_folder

__all__ = [
    "DEVICE",
    "DUMP_VARIABLE",
    "STEP_GRAPH_NAME",
    "input_sharding",
    "parse_annotation",
    "start",
    "to_annotation",
    "xlac",
]


# ----------------------------------------------------------------------------------------- Sharding
#
# Shardings for torch_xla 2.9, both ways, and what else its programs need to know of a tensor.
#
# torch_xla's constructor takes neither an iota nor subgroup types: a tiling is a nested list of
# partition ids, copies are a list of groups. It reads nested lists of at most five levels and takes
# deeper ones for zeros. A sixth tensor dim is reached otherwise: a small tensor is tiled over the
# dims that are cut, reshaped, and asked how the partitioner laid out the result.

DEVICE = torch.device("xla:0")

_REPLICATED, _TILED, _PARTIAL = 0, 3, 5
_MAX_LISTED_RANK = 5


@lru_cache(1)
def xlac() -> Any:
    """Return torch_xla's own C++ module, which is imported on the first call."""
    return importlib.import_module("torch_xla")._XLAC


@lru_cache(4096)
def parse_annotation(text: str) -> OpSharding:
    """Read what torch_xla says of a tensor; the empty text of a tensor without a sharding too."""
    return OpSharding.parse(text).canonical() if text else OpSharding.replicated()


@lru_cache(4096)
def to_annotation(op_sharding: OpSharding) -> Any:
    """Write an OpSharding as torch_xla's own object.

    Args:
        op_sharding: Replicated, or tiled with or without copies.

    Returns:
        A ``torch_xla._XLAC.OpSharding``.

    Raises:
        DistributeError: torch_xla has no such sharding.
    """
    sharding = op_sharding.canonical()
    if sharding.kind == "replicated":
        return xlac().OpSharding([], [], [], _REPLICATED)
    if not sharding.is_tiled or set(sharding.subgroup_types) - {"replicated"}:
        raise DistributeError(
            f"The sharding {sharding} was asked for on torch_xla. It can only tile a tensor, with "
            "or without copies. Pass placements of Shard and Replicate."
        )
    if (sharding.tensor_ndim or 0) > _MAX_LISTED_RANK:
        return _reshaped_annotation(sharding)
    return _listed_annotation(sharding)


def input_sharding(tensor: torch.Tensor, sharding: OpSharding, minibatch: bool) -> Any:
    """Write an OpSharding as the XlaShardingSpec that torch_xla's data loaders use.

    Args:
        tensor: The host tensor that is to be sent.
        sharding: How it is to lie.
        minibatch: Whether each process passes its own part of the batch.

    Returns:
        A ``torch_xla._XLAC.XlaShardingSpec``.
    """
    sharding = sharding.canonical()
    lists = ([], [], [], _REPLICATED) if sharding.kind == "replicated" else _lists(sharding)
    return xlac().XlaShardingSpec(tensor, *lists, minibatch)


def _listed_annotation(sharding: OpSharding) -> Any:
    return xlac().OpSharding(*_lists(sharding))


def _lists(sharding: OpSharding) -> tuple[Any, Any, Any, int]:
    """torch_xla's tile assignment, group assignment, replication groups and type."""
    assignment = sharding.tile_assignment
    if not sharding.subgroup_types:
        return assignment.tolist(), [], [], _TILED
    tiles = assignment.shape[: sharding.tensor_ndim]
    groups = assignment.reshape(int(np.prod(tiles)), -1)
    numbered = np.arange(len(groups)).reshape(tiles)
    return [], numbered.tolist(), groups.tolist(), _PARTIAL


def _reshaped_annotation(sharding: OpSharding) -> Any:
    tiles = sharding.tile_dims[: sharding.tensor_ndim]
    cut = tuple(size for size in tiles if size > 1)
    if len(cut) > _MAX_LISTED_RANK:
        raise DistributeError(
            f"The sharding {sharding} was asked for on torch_xla, which cuts {len(cut)} dims. "
            f"torch_xla 2.9 can say it for {_MAX_LISTED_RANK} at most. Shard fewer dims."
        )
    copies = sharding.tile_dims[len(tiles) :]
    assignment = sharding.tile_assignment.reshape(*cut, *copies)
    small = torch.zeros(cut).to(DEVICE)
    listed = OpSharding.from_assignment(assignment, sharding.subgroup_types)
    xlac()._xla_mark_sharding(small, to_annotation(listed))
    with execution_allowed():
        shaped = (small + 0).reshape(tiles)
        xlac()._xla_sync_multi([shaped], [])
    actual = parse_annotation(xlac()._get_xla_sharding_spec(shaped))
    if actual != sharding:
        raise DistributeError(
            f"The sharding {sharding} was asked for on torch_xla. Its partitioner made {actual} of "
            f"it, and torch_xla 2.9 cannot be told otherwise for {len(tiles)} dims. Reshape the "
            f"tensor to {_MAX_LISTED_RANK} dims, or shard fewer."
        )
    return xlac()._get_xla_op_sharding(shaped)


def cut_unevenly(payload: torch.Tensor, sharding: OpSharding) -> bool:
    """Tell whether `sharding` cuts a dim of `payload` into tiles that do not fill it."""
    return any(extent % sharding.num_tiles(dim) for dim, extent in enumerate(payload.shape))


@contextmanager
def execution_allowed() -> Iterator[None]:
    """Let the body run a program of its own, also while a step is traced as one program."""
    allowed = xlac()._get_allow_execution()
    xlac()._set_allow_execution(True)
    try:
        yield
    finally:
        xlac()._set_allow_execution(allowed)


# --------------------------------------------------------------------------------- Start torch_xla

CPU_DEVICES_VARIABLE = "XLA_DTENSOR_CPU_DEVICES"
DUMP_VARIABLE = "XLA_DTENSOR_DUMP_HLO"
STEP_GRAPH_NAME = "xla_dtensor_step"

_FUNCTIONALIZATION_VARIABLE = "XLA_DISABLE_FUNCTIONALIZATION"
_FAST_EXTREMA = "--xla_cpu_enable_fast_min_max"
_SUPPORTED = "2.9."
_CPU_THREADS = 64
_ON = ("1", "true", "True")


@dataclass(frozen=True)
class Started:
    """What :func:`start` did.

    Args:
        settings: Environment variables that it set.
        dump_dir: Where XLA writes the HLO of compiled steps; None when that was not asked for.
        wraps_all: Whether torch_xla itself wraps every tensor for functionalization.
    """

    settings: Mapping[str, str]
    dump_dir: Path | None
    wraps_all: bool = False


def start(
    num_cpu_devices: int | None,
    dump_hlo: str | os.PathLike[str] | None,
    compile_cache: str | os.PathLike[str] | bool | None = None,
) -> Started:
    """Start torch_xla in SPMD mode.

    Args:
        num_cpu_devices: Virtual CPU devices. None: as the variable XLA_DTENSOR_CPU_DEVICES says,
            else whatever devices torch_xla finds.
        dump_hlo: Folder for the HLO of compiled steps. None: as XLA_DTENSOR_DUMP_HLO says (a
            folder, or 1 for a temporary one), else no HLO is kept.
        compile_cache: Folder for compiled programs, True or False; see
            :mod:`xla_dtensor.runtimes.registry`.

    Returns:
        What was set.

    Raises:
        RuntimeSetupError: Wrong versions, contradicting settings, or too late.
    """
    _check_torch()
    num_devices = _device_count(num_cpu_devices)
    dump_dir = _dump_folder(dump_hlo)
    _check_functionalization()
    _check_not_late(num_devices, dump_dir)
    wraps_all = _started_by_user()
    settings = {} if wraps_all else {_FUNCTIONALIZATION_VARIABLE: "1"}
    if num_devices is not None:
        settings |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_devices)}
    flags = os.environ.get("XLA_FLAGS", "").split()
    if not any(flag.startswith(_FAST_EXTREMA) for flag in flags):
        flags.append(f"{_FAST_EXTREMA}=false")
    if dump_dir is not None:
        dump_dir = _add_dump(flags, dump_dir)
    settings["XLA_FLAGS"] = " ".join(flags)
    os.environ.update(settings)
    _import_torch_xla()
    settings |= _keep_programs(compile_cache)
    if not _is_spmd():  # use_spmd() warns when the variable that it sets itself is there already.
        importlib.import_module("torch_xla.runtime").use_spmd()
    with _enough_threads(num_devices):
        xlac()._init_computation_client()
    _check_started(num_devices)
    torch.autograd.set_multithreading_enabled(False)
    return Started(settings, dump_dir, wraps_all)


def _keep_programs(compile_cache: str | os.PathLike[str] | bool | None) -> dict[str, str]:
    folder = cache_folder(compile_cache, on_cpu=os.environ.get("PJRT_DEVICE") != "TPU")
    if folder is None:
        return {}
    importlib.import_module("torch_xla.runtime").initialize_cache(str(folder))
    return {"compile cache": str(folder)}


def _check_torch() -> None:
    if not torch.__version__.startswith(_SUPPORTED):
        raise RuntimeSetupError(
            f"Runtime 'torch_xla' was asked for with torch={torch.__version__}. torch_xla's last "
            "release is 2.9, which works with torch 2.9 only. Install 'torch==2.9.*' and "
            "'torch_xla==2.9.*', or choose the runtime 'jax'."
        )


def _import_torch_xla() -> None:
    try:
        torch_xla = importlib.import_module("torch_xla")
    except ImportError as error:
        raise RuntimeSetupError(
            f"Runtime 'torch_xla' was asked for, but importing torch_xla failed: {error}. It is "
            "missing, or was built for another torch. Install 'torch_xla==2.9.*' beside "
            f"torch={torch.__version__}, or choose the runtime 'jax'."
        ) from error
    if not torch_xla.__version__.startswith(_SUPPORTED):
        raise RuntimeSetupError(
            f"Runtime 'torch_xla' was asked for with torch_xla={torch_xla.__version__}. It is "
            "written for the interface of 2.9. Install 'torch_xla==2.9.*'."
        )


def _device_count(num_cpu_devices: int | None) -> int | None:
    count: Any = num_cpu_devices
    if count is None:
        count = os.environ.get(CPU_DEVICES_VARIABLE) or None
    if count is None:
        return None
    if not str(count).isdigit() or int(count) < 1:
        raise RuntimeSetupError(
            f"num_cpu_devices={count!r} was asked for. It is no number of devices. Pass an integer "
            f"from 1 on, as the argument or in {CPU_DEVICES_VARIABLE}."
        )
    platform = os.environ.get("PJRT_DEVICE", "CPU")
    if platform != "CPU":
        raise RuntimeSetupError(
            f"num_cpu_devices={count} was asked for, but PJRT_DEVICE={platform}. Virtual devices "
            "exist on CPU only. Set PJRT_DEVICE=CPU, or leave num_cpu_devices out."
        )
    return int(count)


def _check_functionalization() -> None:
    setting = os.environ.get(_FUNCTIONALIZATION_VARIABLE)
    if setting is not None and setting not in _ON:
        raise RuntimeSetupError(
            f"Runtime 'torch_xla' was asked for with {_FUNCTIONALIZATION_VARIABLE}={setting}. With "
            "it, an op on a DTensor and a plain XLA tensor returns no DTensor. Unset that variable."
        )


def _check_not_late(num_devices: int | None, dump_dir: Path | None) -> None:
    if sys.modules.get("torch_xla") is None:
        return
    if xlac()._xla_get_spmd_config_is_locked() and not _is_spmd():
        raise RuntimeSetupError(
            "Runtime 'torch_xla' was asked for after an XLA tensor or device had been made without "
            "SPMD. torch_xla cannot change over any more: it would crash. Call "
            "get_runtime('torch_xla'), or torch_xla.runtime.use_spmd(), before the first XLA "
            "tensor and before torch_xla.device()."
        )
    if not xlac()._xla_runtime_is_initialized():
        return
    if dump_dir or num_devices not in (None, xlac()._xla_num_global_devices()):
        raise RuntimeSetupError(
            f"num_cpu_devices={num_devices} and dump_hlo={dump_dir and str(dump_dir)!r} were "
            "asked for, but torch_xla's client already runs. It reads them when it starts. Call "
            "get_runtime('torch_xla', ...) before anything asks torch_xla for its devices."
        )


def _started_by_user() -> bool:
    if os.environ.get(_FUNCTIONALIZATION_VARIABLE) is not None:
        return False
    return "torch_xla.runtime" in sys.modules and _is_spmd()


def _is_spmd() -> bool:
    return importlib.import_module("torch_xla.runtime").is_spmd()


def _check_started(num_devices: int | None) -> None:
    probe = xlac()._get_xla_tensor_debug_info(torch.empty(0, device="xla"))
    if "Device: SPMD:0" not in probe:
        raise RuntimeSetupError(
            "Runtime 'torch_xla' was asked for, but this process made XLA tensors before it called "
            "use_spmd(). torch_xla then computes on one device, or crashes. Start a new process "
            "and call get_runtime('torch_xla') first."
        )
    actual = xlac()._xla_num_global_devices()
    if num_devices not in (None, actual):
        raise RuntimeSetupError(
            f"num_cpu_devices={num_devices} was asked for, but torch_xla has {actual} devices. "
            "Its client was configured otherwise. Unset CPU_NUM_DEVICES, or pass "
            f"num_cpu_devices={actual}."
        )


@contextmanager
def _enough_threads(num_devices: int | None) -> Iterator[None]:
    devices = num_devices or int(os.environ.get("CPU_NUM_DEVICES", "1"))
    on_cpu = os.environ.get("PJRT_DEVICE") == "CPU"
    if "NPROC" in os.environ or not on_cpu or devices <= (os.cpu_count() or 1):
        yield
        return
    os.environ["NPROC"] = str(max(_CPU_THREADS, 2 * devices))
    try:
        yield
    finally:
        del os.environ["NPROC"]


def _dump_folder(dump_hlo: str | os.PathLike[str] | None) -> Path | None:
    if dump_hlo is not None:
        return Path(dump_hlo)
    folder = os.environ.get(DUMP_VARIABLE, "0")
    if folder in ("", "0"):
        return None
    return Path(tempfile.mkdtemp(prefix="xla_dtensor_hlo_")) if folder in _ON else Path(folder)


def _add_dump(flags: list[str], dump_dir: Path) -> Path:
    """Add the dump to XLA's flags; a dump that the user asked for keeps its folder."""
    theirs = [flag.split("=", 1)[1] for flag in flags if flag.startswith("--xla_dump_to=")]
    if theirs:
        dump_dir = Path(theirs[-1])
    else:
        flags += [f"--xla_dump_to={dump_dir}", f"--xla_dump_hlo_module_re={STEP_GRAPH_NAME}"]
    if "--xla_dump_hlo_as_text" not in flags:
        flags.append("--xla_dump_hlo_as_text")
    dump_dir.mkdir(parents=True, exist_ok=True)
    return dump_dir
