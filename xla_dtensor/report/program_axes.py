"""The mesh axes of each collective of a program.

Where the program runs on one slice, the places in its replica groups are places in the mesh. Where
it runs on several, they are places within a slice, and the slices must be given to name the axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh_utils import Mesh
from xla_dtensor.report.device_groups import device_groups
from xla_dtensor.report.errors import HloError
from xla_dtensor.report.granules import Granules, transfer_axes
from xla_dtensor.report.hlo_module import HloModule
from xla_dtensor.report.mesh_axes import AxisNames, group_axes, pair_axes
from xla_dtensor.report.replica_groups import ReplicaGroups


@dataclass(frozen=True)
class ProgramAxes:
    """Names mesh axes for one module.

    Args:
        mesh: the mesh whose axes are wanted, over all devices of the program. Its root (or itself)
            gives the device order.
        replica_count: of the module.
        num_partitions: of the module.
        granules: the slices, if the program runs on several and they are known.
    """

    mesh: Mesh
    replica_count: int
    num_partitions: int
    granules: Granules | None

    @classmethod
    def of(
        cls, module: HloModule, mesh: Mesh, granules: Sequence[int] | NDArray[np.integer] | None
    ) -> "ProgramAxes":
        """Makes one, checking that the mesh can be the program's.

        Args:
            module: the module.
            mesh: a root mesh, or a mesh cut out of one; then the axes are those of `mesh` if it has
                all devices of the root, else those of the root.
            granules: the slice of each device, in the order of `mesh.root.device_ids.flat`.

        Returns:
            The namer.

        Raises:
            HloError: a mesh, or slices, of another size than the program.
        """
        whole = mesh if mesh.size() == mesh.root.size() else mesh.root
        size = module.replica_count * module.num_partitions
        if whole.size() % size:
            raise HloError(
                f"The axes of {whole!r} were asked for a program of {size} devices. "
                f"{whole.size()} devices do not run it. Pass the mesh it was compiled for."
            )
        slices = None if granules is None else Granules(granules)
        if slices is not None and slices.places.size != whole.size():
            raise HloError(
                f"Granules of {slices.places.size} devices were given for {whole!r}. Each device "
                f"has one. Pass {whole.size()} granules, in the order of mesh.device_ids.flat."
            )
        return cls(whole, module.replica_count, module.num_partitions, slices)

    def of_groups(
        self, groups: ReplicaGroups, kind: str, channel_id: int | None, global_ids: bool
    ) -> AxisNames | None:
        """Names the axes of a collective with groups.

        Args:
            groups: as printed.
            kind: of the collective.
            channel_id: as printed.
            global_ids: its use_global_device_ids.

        Returns:
            The axes; None if the groups follow none.
        """
        local = device_groups(
            groups,
            kind,
            channel_id is not None,
            global_ids,
            self.replica_count,
            self.num_partitions,
        )
        if local is not None and local.shape[1] == 1:
            return ()
        places = None if local is None else self._places(local)
        return None if places is None else group_axes(places, self.mesh)

    def of_pairs(self, pairs: Sequence[tuple[int, int]]) -> AxisNames | None:
        """Names the axes along which a permute moves.

        Args:
            pairs: from and to, as printed.

        Returns:
            The axes; None if the pairs have devices that the program has not.
        """
        local = np.array(pairs, np.int64).reshape(-1, 2)
        if local.max(initial=0) >= self.replica_count * self.num_partitions:
            return None
        places = self._places(local)
        return None if places is None else pair_axes(places, self.mesh)

    def of_target(self, target: str) -> AxisNames | None:
        """Names the axes of a transfer between slices.

        Args:
            target: as printed.

        Returns:
            The axes; None if they cannot be told.
        """
        return transfer_axes(target, self.mesh, self.granules)

    def _places(self, local: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Places in mesh.device_ids.flat of places in the program."""
        if self.replica_count * self.num_partitions < self.mesh.size():
            if self.granules is None or local.max(initial=0) >= self.granules.places.shape[1]:
                return None
            local = self.granules.local_to_mesh(local)
        if self.mesh.is_root:
            return local
        place_of = np.empty(self.mesh.size(), np.int64)
        place_of[self.mesh.positions().reshape(-1)] = np.arange(self.mesh.size())
        return place_of[local]
