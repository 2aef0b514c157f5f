"""What holds for ops while they run: settings of the trace, clock, names, generators, checks.

What the number means is the runtime's own affair; that it is one number, and how it is packed, is
the same on all.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from xla_dtensor.core.errors import ArgumentTypeError
from xla_dtensor.report.attribution import AskedFor
from xla_dtensor.runtimes.torch_own import past_functions

__all__ = [
    "ON_MESH",
    "ProgramToCheck",
    "StepClock",
    "check",
    "checking",
    "follow_torch_seed",
    "follow_torch_states",
    "named_from",
    "naming_modules",
    "num_tokens",
    "pack_state",
    "register_setting",
    "trace_settings",
    "unpack_state",
]

# The classes of tensors that lie on a mesh: runtimes, which are below them, are told.
ON_MESH: list[type[torch.Tensor]] = []


# ----------------------------------------------------------------------------------- Before running
#
# Checks of compiled programs before they run, as a context of the calling thread.
#
# The layers above open one around calls of compiled steps; a runtime that can read its traces calls
# `check` with each program that is about to run. What the check raises ends the call, and the
# program does not run.


@dataclass(frozen=True, eq=False)
class ProgramToCheck:
    """A program that is about to run.

    Attributes:
        name: of the step.
        hlo: Returns the partitioned program's text.
        asked: Returns the redistributes of its trace.
        arguments: The leaves of the call's arguments.
    """

    name: str
    hlo: Callable[[], str]
    asked: Callable[[], tuple[AskedFor, ...]]
    arguments: Sequence[Any]


Check = Callable[[ProgramToCheck], None]
_active: ContextVar[Check | None] = ContextVar("xla_dtensor.hosts.preemption", default=None)


@contextmanager
def checking(checker: Check | None) -> Iterator[None]:
    """Let `checker` be called with every program before it runs; None switches an outer one off."""
    token = _active.set(checker)
    try:
        yield
    finally:
        _active.reset(token)


def check(program: Callable[[], ProgramToCheck]) -> None:
    """Check a program, if somebody wants that.

    Args:
        program: Makes what is checked; called only then.
    """
    checker = _active.get()
    if checker is not None:
        checker(program())


# ------------------------------------------------------------------------------------- Module names
#
# Name what each module computes, so that a profile and the HLO say whose an op is.
#
# While a step is traced, every module call opens a scope of the compiler: ops of
# ``model.layers[0].attention`` are called ``Llama/layers.0/attention/...``, and what an optimizer's
# step computes ``optimizer/...``. The backward calls no modules: its ops have the names of the
# forward's, after ``backward`` (``trace``).

Scope = Callable[[str], AbstractContextManager[Any]]

_paths: dict[int, str] = {}


class _Names:
    """The modules that are being called, outermost first, and their names within their parents."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._open: list[tuple[str, AbstractContextManager[Any]]] = []
        self._local: dict[int, str] = {}

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """Open a module's scope; a forward pre-hook."""
        name = self._local.get(id(module)) or _paths.get(id(module)) or type(module).__name__
        for child_name, child in module.named_children():
            self._name(child_name, child)
        scope = self._scope(name)
        scope.__enter__()
        self._open.append((name, scope))

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Close it; a forward hook, called after an exception too."""
        if self._open:
            self._open.pop()[1].__exit__(None, None, None)

    def enter_optimizer(self, *_: Any) -> None:
        """Open an optimizer's scope; a pre-hook of its step."""
        scope = self._scope("optimizer")
        scope.__enter__()
        self._open.append(("optimizer", scope))

    def leave_optimizer(self, *_: Any) -> None:
        """Close it; a post-hook of its step."""
        if self._open and self._open[-1][0] == "optimizer":
            self._open.pop()[1].__exit__(None, None, None)

    def close(self) -> None:
        """Close what is still open."""
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)

    def _name(self, name: str, module: torch.nn.Module) -> None:
        self._local[id(module)] = name
        if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):  # Never called itself.
            for child_name, child in module.named_children():
                self._name(f"{name}.{child_name}", child)


@contextlib.contextmanager
def named_from(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Let a module that no other module calls have its path in a model, not its class's name.

    A step that calls ``model.encoder(x)`` has ops of ``encoder`` then, and not of ``Encoder``.

    Args:
        models: The models that paths begin at.
    """
    outer = dict(_paths)
    _paths.update((id(module), path) for m in models for path, module in m.named_modules() if path)
    try:
        yield
    finally:
        _paths.clear()
        _paths.update(outer)


@contextlib.contextmanager
def naming_modules(scope: Scope) -> Iterator[None]:
    """Open a scope for each module that is called inside.

    Args:
        scope: Makes the compiler's scope of a name; scopes nest.
    """
    names = _Names(scope)
    handles = [
        torch_module.register_module_forward_pre_hook(names.enter),
        torch_module.register_module_forward_hook(names.leave, always_call=True),
        register_optimizer_step_pre_hook(names.enter_optimizer),
        register_optimizer_step_post_hook(names.leave_optimizer),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        names.close()


# ----------------------------------- The state of a runtime's random number generator, as a tensor


def pack_state(number: int) -> torch.Tensor:
    """Return a number, taken modulo 2**64, as a uint8 tensor of shape (8,)."""
    number %= 2**64
    signed = number - 2**64 if number >= 2**63 else number
    return torch.tensor([signed], dtype=torch.int64).view(torch.uint8)


def unpack_state(state: Any) -> int:
    """Return the number that :func:`pack_state` packed.

    Raises:
        ArgumentTypeError: Not a uint8 tensor of shape (8,).
    """
    if type(state) is not torch.Tensor or (state.dtype, *state.shape) != (torch.uint8, 8):
        shown = f"{state.dtype}{list(state.shape)}" if isinstance(state, torch.Tensor) else state
        raise ArgumentTypeError(
            f"A random number generator was given state={shown!r} of type={type(state).__name__}. "
            "Its state is a plain uint8 tensor of shape (8,), and belongs to one runtime. Pass "
            "what get_rng_state() or get_states() returned."
        )
    return int(state.cpu().contiguous().view(torch.int64).item()) % 2**64


# ------------------------------------------------------------------- How fast a compiled step goes
#
# The time from call to call, tokens per second, utilisation.
#
# A call returns before the devices are done, so what a call takes says little. In a loop that is
# full, calls follow one another as fast as the devices work; the clock takes the time between the
# starts of consecutive calls, and leaves out those between which a program was traced.

_KEPT = 100


class StepClock:
    """The starts of a step's calls.

    Args:
        now: The clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._before: float | None = None
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def start(self) -> None:
        """Note that a call begins."""
        began = self._now()
        if self._before is not None:
            self._seconds.append(began - self._before)
        self._before = began

    def interrupt(self) -> None:
        """Leave out the time from this call to the next: it compiles."""
        self._before = None

    def metrics(
        self, tokens: int | None, flops: int | None, peak_flops: float | None
    ) -> Mapping[str, float | None]:
        """Return what :meth:`CompiledStep.metrics` does.

        Args:
            tokens: Tokens per call; None where nobody knows.
            flops: Floating-point operations per call, on all devices.
            peak_flops: What all devices together can do per second.
        """
        seconds = statistics.median(self._seconds) if self._seconds else None

        def per_second(amount: float | None) -> float | None:
            return None if seconds is None or amount is None else amount / seconds

        speed = per_second(flops)
        return {
            "step_seconds": seconds,
            "tokens_per_second": per_second(tokens),
            "flops_per_step": flops,
            "flops_per_second": speed,
            "mfu": None if speed is None or peak_flops is None else speed / peak_flops,
        }


def num_tokens(leaves: list[Any]) -> int | None:
    """Return the size of the largest tensor of integers among a call's arguments, token ids."""
    sizes = [
        leaf.numel()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.int64, torch.int32)
    ]
    return max(sizes, default=None)


# ------------------------------------------------- torch.manual_seed reaches the runtime's devices
#
# Torch seeds the devices that it knows, and whatever sits under the name of the backend that it
# leaves free ("PrivateUse1"): if ``torch.<that name>`` has ``manual_seed_all``, it is called. The
# JAX runtime has no device of its own in torch, torch_xla's is not among those that torch seeds;
# the module registered here is how both hear of it. Nothing of torch is replaced, and there is no
# such device: the module says so.
#
# The call comes with every ``torch.manual_seed``, also with the seed that was set before. A look at
# ``torch.initial_seed()`` would miss that.

logger = logging.getLogger("xla_dtensor")
_numpy = past_functions("numpy")
_told_of_states: list[Any] = []
_MODULE = "xla_dtensor's ear for torch.manual_seed"


def follow_torch_seed(seed: Callable[[int], None]) -> bool:
    """Call `seed` whenever torch's generators are seeded.

    Args:
        seed: Seeds the runtime's generator; given what ``torch.manual_seed`` was given.

    Returns:
        Whether torch will call it: not when another package holds the name of the free backend.
    """
    name = torch._C._get_privateuse1_backend_name()
    present = getattr(torch, name, None)
    if present is not None and present.__doc__ != _MODULE:
        logger.warning(
            "torch.manual_seed does not reach xla_dtensor's devices, because torch.%s is another "
            "package's. Call xla_dtensor.manual_seed(seed, mesh) as well.",
            name,
        )
        return False
    module = ModuleType(f"torch.{name}", _MODULE) if present is None else present
    process = os.getpid()
    module.__dict__.update(
        # A data loader's worker seeds torch, too. It is a fork, in which no runtime may be used.
        _is_in_bad_fork=lambda: os.getpid() != process,
        manual_seed_all=seed,
        is_available=lambda: False,
        is_initialized=lambda: False,
        device_count=lambda: 0,
    )
    if present is None:
        torch._register_device_module(name, module)
    return True


def follow_torch_states(was_read: Callable[[bytes], None], is_set: Callable[[bytes], None]) -> None:
    """Call these whenever the state of torch's generator is asked for, and when one is set.

    ``torch.get_rng_state`` and ``set_rng_state`` go on to do what they do; ``fork_rng`` calls them.

    Args:
        was_read: Given the bytes of the state.
        is_set: Given those of the state that it has from now on.
    """
    if _told_of_states:
        return
    _told_of_states.append((was_read, is_set))
    get_state, set_state, process = torch.get_rng_state, torch.set_rng_state, os.getpid()

    @functools.wraps(get_state)
    def get_rng_state() -> torch.Tensor:
        state = get_state()
        if os.getpid() == process:  # not in a data loader's worker, which is a fork
            was_read(_numpy(state).tobytes())
        return state

    @functools.wraps(set_state)
    def set_rng_state(new_state: torch.Tensor) -> None:
        set_state(new_state)
        if os.getpid() == process:
            is_set(_numpy(new_state).tobytes())

    for module in (torch, torch.random):
        vars(module).update(get_rng_state=get_rng_state, set_rng_state=set_rng_state)


# ------------------------------------ Settings that a traced step depends on besides its arguments
#
# A program traced under one setting must not serve a call under another. torch has some that are in
# force around a call, ``with torch.autocast(...): step(x)``; the layers above the runtimes register
# how to read theirs. A runtime makes them part of what it finds programs by.

_DEVICE_TYPES = ("cpu", "xla")  # which the runtimes' tensors report
_readers: dict[str, Callable[[], Hashable]] = {}


def register_setting(name: str, read: Callable[[], Hashable]) -> None:
    """Make what `read` returns part of what tells programs apart.

    Args:
        name: What the setting is called; a second one of the same name replaces the first.
        read: Called on every call of a compiled step, in the thread of the call.
    """
    _readers[name] = read


def trace_settings() -> tuple[tuple[str, Hashable], ...]:
    """Return the present value of every setting, by name: torch's, then the registered ones."""
    autocast = [
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in _DEVICE_TYPES
    ]
    # The user's modes that see every function of torch are told apart by what they are.
    modes = [id(mode) for mode in torch.overrides._get_current_function_mode_stack()]
    # And so are those that see every op, and hooks of what the backward pass keeps.
    op_modes = [id(mode) for mode in _get_current_dispatch_mode_stack()]
    hooks = _top_saved_tensors_default_hooks(False)
    return (
        ("the precision of float32 products", torch.get_float32_matmul_precision()),
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("autocast", tuple(autocast)),
        ("the default dtype", torch.get_default_dtype()),
        ("the default device", str(torch.get_default_device())),
        ("deterministic algorithms", torch.are_deterministic_algorithms_enabled()),
        ("kernels of attention", _attention_kernels()),
        ("modes for functions", tuple(modes)),
        ("modes for ops", tuple(op_modes)),
        ("hooks of saved tensors", None if hooks is None else tuple(map(id, hooks))),
        *[(name, read()) for name, read in _readers.items()],
    )


def _attention_kernels() -> tuple[bool, ...]:
    backends = torch.backends.cuda
    return (
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
    )
