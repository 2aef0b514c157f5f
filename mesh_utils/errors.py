"""The errors of mesh_utils.

Each message has three short sentences: what was asked, why it is refused, what to pass instead.

Example:
    >>> from mesh_utils import Mesh, MeshError
    >>> try:
    ...     Mesh(range(6), (2, 4))
    ... except MeshError as error:
    ...     print(str(error).split(". ")[0])
    Mesh was given 6 device ids for mesh_shape=(2, 4)
"""


class MeshError(ValueError):
    """A mesh, or a question to one, that cannot be."""


class AxisError(MeshError):
    """An axis that a mesh does not have, or that was named twice."""


class ArgumentTypeError(MeshError, TypeError):
    """An object of another type than the function declares."""


class TopologyError(MeshError):
    """A topology that cannot be, that there is not, or of which too little is known."""


class JobError(MeshError):
    """A job, a set of XLA flags or a launcher that cannot be."""
