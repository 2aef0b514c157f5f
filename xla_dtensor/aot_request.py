"""What is asked of the process that compiles for a machine that is not here, as plain data.

It travels as JSON from `compile_for` to a child, which may run in another interpreter. A function
is named by its module and its name, or, where its module is the script itself, by the script's
file: the child imports it, as multiprocessing's children do.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mesh_utils import Axis, Mesh, Topology
from xla_dtensor.errors import CompileError

__all__ = ["Request", "function_of", "name_function"]

_SCRIPT = "__xla_dtensor_script__"


@dataclass(frozen=True)
class Request:
    """A step to compile for a machine.

    Attributes:
        function: what makes model, step, inputs and placements, as `name_function` names it.
        keywords: further arguments of that function; JSON values.
        topology: the name of the machine.
        wrap: for each dim of a slice whether it wraps; None for the table's answer.
        device_ids: of the mesh, in its order.
        mesh_shape: the sizes of its axes.
        axis_names: their names.
        title: what is compiled, for people.
        command: what makes the report again.
        flags: XLA's flags that the child is started with, for the report.
        executable: where the compiled program is to be saved; "" for nowhere.
        cache: the folder of earlier results; "" for none.
    """

    function: str
    keywords: Mapping[str, Any]
    topology: str
    wrap: tuple[bool, ...] | None
    device_ids: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    axis_names: tuple[Axis, ...]
    title: str
    command: str = ""
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    executable: str = ""
    cache: str = ""

    def to_json(self) -> str:
        """The request as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        for name in ("wrap", "device_ids", "mesh_shape", "axis_names"):
            data[name] = None if data[name] is None else tuple(data[name])
        return cls(**data)

    def read_topology(self) -> Topology:
        """The machine."""
        return Topology.parse(self.topology, wrap=self.wrap, allow_unreal=True)

    def read_mesh(self) -> Mesh:
        """The mesh."""
        return Mesh(self.device_ids, self.mesh_shape, self.axis_names)


def name_function(function: str | Callable[..., Any]) -> str:
    """Name a function so that another process finds it.

    Args:
        function: A function of a module, or such a name: "package.module:function",
            "folder/file.py:function".

    Returns:
        The name.

    Raises:
        CompileError: A function inside another one, a lambda, or one that was typed into a prompt.

    Example:
        >>> name_function(json.dumps)
        'json:dumps'
    """
    if isinstance(function, str):
        if not all(function.rpartition(":")):
            raise CompileError(
                f"A step was asked for as {function!r}. That names no function. Pass "
                "'module:function' or 'file.py:function'."
            )
        return function
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    place: str | None = module
    if module == "__main__":
        spec, file = (
            sys.modules["__main__"].__spec__,
            getattr(sys.modules["__main__"], "__file__", None),
        )
        place = spec.name if spec is not None else file and str(Path(file).resolve())
    if not name or "<" in name or not place:
        raise CompileError(
            f"A step was asked for as {name or function!r}. It is compiled in a process of its "
            "own, which imports the function, and this one cannot be imported. Pass a function "
            "that a file defines on its top level."
        )
    return f"{place}:{name}"


def function_of(name: str) -> Callable[..., Any]:
    """Import the function that `name_function` named.

    Args:
        name: Its name.

    Raises:
        CompileError: There is no such module, file or function.
    """
    place, _, attribute = name.rpartition(":")
    try:
        found: Any = _script(place) if place.endswith(".py") else importlib.import_module(place)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, OSError, AttributeError) as error:
        raise CompileError(
            f"A step was asked for as {name!r}. It cannot be imported: {error}. Pass "
            "'module:function' of a module on the path, or 'file.py:function'."
        ) from error
    return found


def _script(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(_SCRIPT, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_SCRIPT] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    return module
