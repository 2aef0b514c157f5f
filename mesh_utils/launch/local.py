"""A job on one machine: its axes, scaled down to a few processes of a few devices.

The names and the order of the axes stay, and so does what runs where:

- The processes are slices, where the job has several: as many as divide the processes, and at most
  as many as the job has. The dcn sizes shrink to that number; so what crosses slices in the job
  crosses processes here.
- The other processes are hosts of a slice. The ici sizes shrink to the devices of a slice, and the
  last axes lie inside a process, as they lie inside a host.
- Sizes shrink factor by factor: every axis that is larger than 1 in the job gets a factor first,
  the larger axes before the smaller; what is left goes to the axis that shrank the most. No axis
  gets larger than it is in the job, and none of size 1 grows.

    llama3_70b_v5p_2slices      dp=2 (2 over DCN)   fsdp=128    tp=4    1024 devices
    4 processes of 2 devices    dp=2 (2 over DCN)   fsdp=2      tp=2    2 slices of 2 hosts
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from mesh_utils.assignment import across_slices
from mesh_utils.errors import JobError
from mesh_utils.job import JobAxis, JobConfig, read_sizes


@dataclass(frozen=True)
class LocalPlan:
    """A job, as this machine runs it.

    Attributes:
        axes: the axes with their sizes here.
        processes: how many processes.
        devices: how many devices each has.
        slices: how many slices the processes stand for.

    Example:
        >>> plan = local_plan(JobConfig.load("llama3_70b_v5p_2slices"), 4, 2)
        >>> print(*plan.axes)
        dp=2 (2 over DCN) fsdp=2 tp=2
        >>> plan.slices, [plan.slice_of(process) for process in range(4)]
        (2, [0, 0, 1, 1])
    """

    axes: tuple[JobAxis, ...]
    processes: int
    devices: int
    slices: int

    def slice_of(self, process: int) -> int:
        """The slice that a process stands for.

        Args:
            process: its number, from 0.

        Returns:
            The number of the slice, from 0.
        """
        return process * self.slices // self.processes


def local_plan(
    job: JobConfig, processes: int, devices: int, axes: object | None = None
) -> LocalPlan:
    """Scales a job down to this machine.

    Args:
        job: the job.
        processes: how many processes.
        devices: how many devices each has.
        axes: sizes to take instead of scaled ones, as under `axes` of a job file; the names have
            to be the job's.

    Returns:
        The plan.

    Raises:
        JobError: no processes or devices, more devices than the job has, or axes that do not fit.

    Example:
        >>> print(*local_plan(JobConfig.load("mixtral_8x7b_v5p"), 2, 4).axes)
        fsdp=4 ep=2
        >>> axes = {"fsdp": {"ici": 2}, "ep": {"ici": -1}}
        >>> print(*local_plan(JobConfig.load("mixtral_8x7b_v5p"), 2, 4, axes).axes)
        fsdp=2 ep=4
    """
    request = f"Job {job.name!r} was to run here on {processes} processes of {devices} devices"
    if processes < 1 or devices < 1:
        raise JobError(f"{request}. There has to be one of each. Pass 1 or more of both.")
    if axes is not None:
        return _plan_of_axes(job, processes, devices, axes, request)
    slices = max(n for n in range(1, min(processes, job.num_slices) + 1) if processes % n == 0)
    inside = processes // slices * devices
    there = job.topology().devices_per_slice
    if inside > there:
        raise JobError(
            f"{request}, {inside} for each of {slices} slices. A slice of the job has {there}, and "
            "sizes are only scaled down. Pass fewer, or the sizes with --axes."
        )
    ici = _shrunk(job.ici_mesh_shape, inside, request)
    dcn = _shrunk(job.dcn_mesh_shape, slices, request)
    names = zip(job.axis_names, ici, dcn, strict=True)
    return LocalPlan(tuple(JobAxis(*sizes) for sizes in names), processes, devices, slices)


def _plan_of_axes(
    job: JobConfig, processes: int, devices: int, axes: object, request: str
) -> LocalPlan:
    written = read_sizes(axes, request)
    names = [axis.name for axis in written]
    if tuple(names) != job.axis_names:
        raise JobError(
            f"{request} with axes {', '.join(names)}. Those of the job are "
            f"{', '.join(job.axis_names)}, in that order. Pass a size for each of them."
        )
    num_slices = prod(axis.dcn for axis in written if axis.dcn != -1)
    slices = num_slices if all(axis.dcn != -1 for axis in written) else processes
    if slices < 1 or processes % slices:
        raise JobError(
            f"{request} with dcn sizes that multiply to {slices}. Slices are of whole processes, "
            f"and {slices} do not divide {processes}. Pass dcn sizes whose product "
            f"divides {processes}."
        )
    ici, dcn = prod(a.ici for a in written), prod(a.dcn for a in written)
    inside = processes // slices * devices
    filled = tuple(
        JobAxis(
            axis.name,
            inside // -ici if axis.ici == -1 else axis.ici,
            slices // -dcn if axis.dcn == -1 else axis.dcn,
        )
        for axis in written
    )
    if prod(a.ici for a in filled) != inside or prod(a.dcn for a in filled) != slices:
        sizes = ", ".join(map(str, filled))
        raise JobError(
            f"{request} with axes {sizes}. {slices} slices of {inside} devices are here, and the "
            "sizes multiply to something else. Pass sizes whose products are these, or one -1."
        )
    return LocalPlan(filled, processes, devices, slices)


def _shrunk(sizes: Sequence[int], count: int, request: str) -> tuple[int, ...]:
    """Sizes like the given ones, none larger, whose product is a smaller count."""
    shrunk = [1] * len(sizes)
    for factor in _primes(count):
        fitting = [a for a, size in enumerate(sizes) if shrunk[a] * factor <= size]
        if not fitting:
            raise JobError(
                f"{request}. {count} devices are not to be made of sizes up to "
                f"{' x '.join(map(str, sizes))}. Pass another number, or the sizes with --axes."
            )
        axis = max(fitting, key=lambda a: (shrunk[a] == 1, sizes[a] / shrunk[a], -a))
        shrunk[axis] *= factor
    return tuple(shrunk)


def _primes(count: int) -> list[int]:
    """Prime factors, the largest first."""
    primes: list[int] = []
    factor = 2
    while count > 1:
        while count % factor == 0:
            primes.append(factor)
            count //= factor
        factor += 1
    return primes[::-1]


def local_mesh_ids(axes: Sequence[JobAxis], device_ids: Sequence[int]) -> NDArray[np.int64]:
    """Lays devices out along axes, as a mesh over several slices has them.

    Args:
        axes: the axes.
        device_ids: the devices, process after process.

    Returns:
        Their ids, of the mesh's shape: on every axis the dcn part is the outer one, and the last
        axes are the innermost.

    Raises:
        JobError: another number of devices.

    Example:
        >>> local_mesh_ids([JobAxis("dp", 2, 2), JobAxis("tp", 2)], range(8)).tolist()
        [[0, 1], [2, 3], [4, 5], [6, 7]]
        >>> local_mesh_ids([JobAxis("dp", 2), JobAxis("tp", 2, 2)], range(8)).tolist()
        [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    count = prod(axis.size for axis in axes)
    if len(device_ids) != count:
        raise JobError(
            f"A mesh of axes {', '.join(map(str, axes))} was asked for on {len(device_ids)} "
            f"devices. It takes {count}. Start as many processes and devices as the launcher does."
        )
    dcn, ici = [axis.dcn for axis in axes], [axis.ici for axis in axes]
    return across_slices(np.array(device_ids, np.int64), dcn, ici)
