"""Random numbers: seeds and states on a mesh, and trackers of generators.

Where each rank draws its own shard, a tracker has to bring the ranks' generators to the right
offset before a draw and into step after it. Here a draw is one of the global tensor, so torch's
tracker has little left to do; it is here for code that asks for it. The named one is of use: it
keeps streams apart, say one for initialising weights and one for dropout.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.tensor import _random as torch_random

from xla_dtensor.core.argument_types import argument_types
from xla_dtensor.core.errors import MeshRankError, RngStateError
from xla_dtensor.dtensor.mesh import as_device_mesh, mesh_text
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["OffsetBasedRNGTracker", "RNGStatesTracker", "is_rng_supported_mesh", "manual_seed"]


# ------------------------------------------------------------ Trackers of random number generators

logger = logging.getLogger("xla_dtensor")


class OffsetBasedRNGTracker:
    """torch's tracker of the generator that a mesh draws from.

    Args:
        device_mesh: The mesh, of device type "xla".
        run_state_sync: Whether all processes take over the first one's state now.

    Raises:
        DistributeError: A mesh of another device type.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (8,))
        >>> x = xd.zeros(8, device_mesh=mesh)
        >>> tracker = OffsetBasedRNGTracker(mesh)
        >>> drawn = []
        >>> for _ in range(2):
        ...     generator = torch.Generator().manual_seed(7)
        ...     with tracker._distribute_region(x._spec, generator):
        ...         drawn.append(torch.rand_like(x).full_tensor().cpu())
        >>> torch.equal(*drawn)
        True
    """

    def __init__(self, device_mesh: Any, run_state_sync: bool = True) -> None:
        as_device_mesh(device_mesh)
        self._runtime = get_runtime()
        self._use_distribute_region = True
        if run_state_sync:
            self._take_over_first_process_state()

    @property
    def distribute_region_enabled(self) -> bool:
        """Whether a region draws from the generator that it is given.

        Without regions PyTorch lets each rank draw for itself. Here values never differ by rank.
        """
        return self._use_distribute_region

    @distribute_region_enabled.setter
    def distribute_region_enabled(self, value: bool) -> None:
        self._use_distribute_region = value

    @contextlib.contextmanager
    def _distribute_region(
        self, spec: Any, generator: torch.Generator | None = None
    ) -> Iterator[None]:
        """Let random ops inside draw global values.

        Args:
            spec: How the tensor lies, on which nothing depends.
            generator: Draw from this one's seed: it gives one number for the whole region, and
                the devices' own generator stays where it is. None draws from that.
        """
        if generator is None or not self._use_distribute_region:
            yield
            return
        seed = int(torch.randint(2**63 - 1, (), device="cpu", generator=generator))
        with self._runtime.using_rng(self._runtime.new_rng(seed)):
            yield

    def _manual_seed(self, parallel_seed: int) -> None:
        self._runtime.manual_seed(parallel_seed)

    def _get_device_state(self) -> torch.Tensor:
        return self._runtime.get_rng_state()

    def _set_device_state(self, state: torch.Tensor) -> None:
        self._runtime.set_rng_state(state)

    def _take_over_first_process_state(self) -> None:
        state, first = self._runtime.get_rng_state(), self._runtime.first_process_state()
        if not torch.equal(state, first):
            logger.warning(
                "The processes of this job were seeded differently, and take over the first one's "
                "random state. Call torch.manual_seed with the same seed in each."
            )
            self._runtime.set_rng_state(first)


class RNGStatesTracker:
    """Generators by name, beside the one that the devices use; Megatron's tracker on a mesh.

    A fork works in eager code, in a compiled step and under ``torch.utils.checkpoint``, which
    repeats inside a fork what the forward pass drew there.

    Example:
        >>> import torch, xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (8,))
        >>> x = xd.zeros(8, device_mesh=mesh)
        >>> tracker = RNGStatesTracker()
        >>> tracker.add("model-parallel-rng", 1234)
        >>> with tracker.fork():
        ...     first = torch.rand_like(x)
        >>> sorted(tracker.get_states())
        ['model-parallel-rng']
    """

    def __init__(self) -> None:
        self._rngs: dict[str, Any] = {}
        self._former: dict[str, Any] = {}  # which steps that are compiled already draw from
        self._seeds: set[int] = set()

    def is_initialized(self) -> bool:
        """Tell whether a state was added or set."""
        return bool(self._rngs)

    def reset(self) -> None:
        """Forget all states."""
        self._former |= self._rngs
        self._rngs = {}
        self._seeds.clear()

    def add(self, name: str, seed: int) -> None:
        """Add a generator.

        Args:
            name: Its name, a new one.
            seed: Where it starts; no other one's seed, which would draw the same numbers.

        Raises:
            RngStateError: The name or the seed is in use.
        """
        if seed in self._seeds:
            raise RngStateError(
                f"add was called with name={name!r} and seed={seed}. The seed {seed} already "
                "exists, and two generators would draw the same numbers. Pass another seed."
            )
        if name in self._rngs:
            raise RngStateError(
                f"add was called with name={name!r} and seed={seed}. The state {name!r} already "
                "exists. Pass another name, or call reset() first."
            )
        runtime = get_runtime()
        rng = runtime.new_rng(seed)
        if name in self._former:
            state, rng = runtime.get_rng_state(rng), self._former.pop(name)
            runtime.set_rng_state(state, rng)
        self._rngs[name] = rng
        self._seeds.add(seed)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Let random ops inside draw from the generator `name`; the devices' own stays put.

        Raises:
            RngStateError: No generator of this name.
        """
        if name not in self._rngs:
            raise RngStateError(
                f"fork was called with name={name!r}. The state {name!r} is not added; there are "
                f"{sorted(self._rngs)}. Call add({name!r}, seed) first."
            )
        with get_runtime().using_rng(self._rngs[name]):
            yield

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the states by name: uint8 tensors of shape (8,), fit to be saved."""
        return {name: get_runtime().get_rng_state(rng) for name, rng in self._rngs.items()}

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replace all generators by those of `get_states`; they draw what these would have drawn.

        A compiled step that was traced with a generator of the same name goes on with it.
        """
        runtime = get_runtime()
        rngs: dict[str, Any] = {}
        for name, state in states.items():
            former = self._rngs.get(name, self._former.get(name))
            rngs[name] = runtime.new_rng(0) if former is None else former
            runtime.set_rng_state(state, rngs[name])
        self._former |= self._rngs
        self._rngs = rngs


# ------------------------------------------------------------------------ Random numbers on a mesh
#
# Seeding, and torch's questions about it.
#
# One generator draws for all devices of the process, and a draw is one of the global tensor: the
# values do not depend on placements, all devices of a replicated tensor hold the same, and nothing
# has to be offset or synchronised per device. The names and arguments are those of
# ``torch.distributed.tensor._random``.
#
# ===============================  =====================  ==========================================
# generator                        seeded by              drawn from by
# ===============================  =====================  ==========================================
# the devices', one per process    ``torch.manual_seed``  random ops and factories of DTensors
# named ones beside it             ``RNGStatesTracker``   the same, inside ``tracker.fork(name)``
# torch's own for the CPU          ``torch.manual_seed``  plain tensors
# ===============================  =====================  ==========================================
#
# Drawing on the CPU never changes what the devices draw. The other way round, the CPU's generator
# gives one number to each draw on the mesh (JAX) or each fork (torch_xla):
# ``torch.utils.checkpoint`` rewinds no other, and by these numbers a dropout is repeated. A few ops
# that torch_xla runs on the host draw from it outright, with values that do not depend on
# placements either.

_rng_tracker: OffsetBasedRNGTracker | None = None


def is_rng_supported_mesh(device_mesh: Any) -> bool:
    """Tell whether random ops may be used on a mesh.

    Args:
        device_mesh: The mesh.

    Returns:
        True for an "xla" mesh. For a mesh of another device type what torch says, which warns
        where the answer is no.

    Example:
        >>> import xla_dtensor as xd
        >>> is_rng_supported_mesh(xd.init_device_mesh("xla", (8,)))
        True
    """
    if _is_torchs(device_mesh):
        return torch_random.is_rng_supported_mesh(device_mesh)
    as_device_mesh(device_mesh)
    return True


@argument_types
def manual_seed(seed: int, device_mesh: Any) -> None:
    """Seed the generator of a mesh, and with it torch's others, as ``torch.manual_seed`` does.

    Every process of the job has to call it with the same seed. All meshes of a process share one
    generator.

    Args:
        seed: The seed; as in torch, any integer of 64 bits.
        device_mesh: The mesh. One of another device type than "xla" is seeded by torch, which
            warns where it cannot.

    Raises:
        MeshRankError: This process reaches no device of the mesh.

    Example:
        >>> import xla_dtensor as xd
        >>> mesh = xd.init_device_mesh("xla", (8,))
        >>> manual_seed(0, mesh)
        >>> first = xd.rand(8, device_mesh=mesh).full_tensor().cpu()
        >>> manual_seed(0, mesh)
        >>> bool((xd.rand(8, device_mesh=mesh).full_tensor().cpu() == first).all())
        True
    """
    global _rng_tracker
    if _is_torchs(device_mesh):
        torch_random.manual_seed(seed, device_mesh)
        return
    mesh = as_device_mesh(device_mesh)
    if mesh.get_coordinate() is None:
        raise MeshRankError(
            f"manual_seed was called with seed={seed} and a mesh {mesh_text(mesh.value)}. "
            "manual_seed requires the current rank to be a part of the device mesh, and this "
            "process reaches none of its devices. Call it in the processes of the mesh only."
        )
    if _rng_tracker is None:
        _rng_tracker = OffsetBasedRNGTracker(mesh, run_state_sync=False)
    torch.manual_seed(seed)
    # torch has passed it on, unless another package holds the place where it does so.
    get_runtime().manual_seed(seed)


def _is_torchs(mesh: Any) -> bool:
    return isinstance(mesh, TorchDeviceMesh) and mesh.device_type != "xla"
