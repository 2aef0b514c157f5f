"""Trackers of random number generators: torch's for a mesh, and Megatron's of named states.

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

from xla_dtensor.device_mesh import as_device_mesh
from xla_dtensor.errors import RngStateError
from xla_dtensor.runtimes.registry import get_runtime

__all__ = ["OffsetBasedRNGTracker", "RNGStatesTracker"]

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
        mine, first = self._runtime.get_rng_state(), self._runtime.first_process_state()
        if not torch.equal(mine, first):
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
        self._seeds: set[int] = set()

    def is_initialized(self) -> bool:
        """Tell whether a state was added or set."""
        return bool(self._rngs)

    def reset(self) -> None:
        """Forget all states."""
        self._rngs.clear()
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
        self._rngs[name] = get_runtime().new_rng(seed)
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
            rngs[name] = self._rngs[name] if name in self._rngs else runtime.new_rng(0)
            runtime.set_rng_state(state, rngs[name])
        self._rngs = rngs
