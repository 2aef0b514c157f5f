"""How many bytes an element has, by the dtype's name in torch or in HLO, without torch."""

from __future__ import annotations

from pathlib import Path

from mesh_utils.errors import JobError

__all__ = ["host_bytes", "itemsize_bytes"]


# ---------------------------------- How much host memory a process has, from what Linux says of it


def host_bytes(name: str, process: int | str = "self") -> int | None:
    """Return a figure of a process in bytes; None where the system does not say, or it has ended.

    Args:
        name: "VmRSS", what it holds now, or "VmHWM", the most it ever held. The latter is its own,
            unlike ``ru_maxrss``, which a process inherits from the one that started it.
        process: Its id, or "self".

    Example:
        >>> held = host_bytes("VmRSS")
        >>> held is None or held > 1_000_000
        True
    """
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    numbers = [line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:")]
    return int(numbers[0]) * 1024 if numbers else None


# ------------------------------------------------------------------------------------------- Dtypes

_BYTES = {
    1: ("bool", "int8", "uint8", "pred", "s8", "u8", "f8e4m3fn", "f8e5m2"),
    2: ("bfloat16", "float16", "half", "int16", "uint16", "bf16", "f16", "s16", "u16"),
    4: ("float32", "float", "int32", "uint32", "f32", "s32", "u32"),
    8: ("float64", "double", "int64", "uint64", "complex64", "long", "f64", "s64", "u64", "c64"),
    16: ("complex128", "c128"),
}
_SIZES = {name: size for size, names in _BYTES.items() for name in names} | {
    f"float8_{kind}": 1 for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
}


def itemsize_bytes(dtype: str) -> int:
    """Return the bytes of one element.

    Args:
        dtype: Such as "bfloat16", "torch.bfloat16" or "bf16".

    Returns:
        Bytes.

    Raises:
        JobError: An unknown name.

    Example:
        >>> itemsize_bytes("torch.bfloat16"), itemsize_bytes("f32")
        (2, 4)
    """
    size = _SIZES.get(str(dtype).removeprefix("torch."))
    if size is None:
        raise JobError(
            f"The size of an element of dtype={dtype!r} was asked for. There is no such dtype. "
            "Pass a name of torch or HLO, such as bfloat16 or f32."
        )
    return size
