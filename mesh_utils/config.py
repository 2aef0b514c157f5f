"""JobConfig: a job file, read and checked: chips, slices, mesh axes, sharding rules, XLA flags.

    name: llama3-70b                what it is called where it runs
    accelerator: v5p:8x8x8          a slice, as Topology.parse reads it; also v5p-1024, h100-64
    num_slices: 2                   1 by default, or as the accelerator says
    model: llama3-70b               a reference model, for tools that want one
    axes:                           from the least to the most network-hungry
      dp:   {dcn: -1}
      fsdp: {ici: -1}
      tp:   {ici: 4}
    sharding:                       rules: xla_dtensor.core.rules says what they mean
      parameters:
        "**.q_proj.weight": [tp, fsdp]
    xla_flags:                      left out: those that fit every job
      sets: [latency-hiding, dcn]
      flags: {xla_tpu_scoped_vmem_limit_kib: 98304}
      libtpu: 0.0.50.1              the version that will run; jaxlib for GPUs
    run:                            what to start: config_run.py says what may stand here
      command: [python, train.py]

    >>> job = JobConfig.load("llama3_70b_v5p_2slices")
    >>> print(*job.axes)
    dp=2 (2 over DCN) fsdp=128 tp=4
    >>> job.topology(), job.mesh().mesh_shape
    (Topology('2xv5p:8x8x8', 1024 devices, wrap=(True, True, True)), (2, 128, 4))

`wrap` says which dims of a slice wrap, where no table knows: wrap: [true, true]. Whatever else is
written is refused. docs/jobs.md goes through a file line by line.
"""

import os
import warnings as python_warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np

from mesh_utils.assignment import Assignment, assign
from mesh_utils.assignment_orders import DeviceArray
from mesh_utils.config_axes import JobAxis, over_dcn, read_axes
from mesh_utils.config_fields import read_accelerator, read_flags, read_keys, read_text, read_wrap
from mesh_utils.config_run import Run, read_run
from mesh_utils.config_sharding import Sharding, read_sharding
from mesh_utils.device import Device
from mesh_utils.errors import JobError
from mesh_utils.hardware import Chip
from mesh_utils.hybrid import HybridMesh
from mesh_utils.job_file import read_job_file
from mesh_utils.topology import Topology
from mesh_utils.xla_flags import COMPILERS, XlaFlag, flag_environment, flags_for

_KEYS = (
    "name",
    "accelerator",
    "num_slices",
    "wrap",
    "model",
    "axes",
    "sharding",
    "xla_flags",
    "run",
)


@dataclass(frozen=True)
class JobConfig:
    """A job. Made by `load` or `parse`.

    Attributes:
        name: what it is called.
        accelerator: one slice of it, or all slices, as Topology.parse reads it.
        num_slices: how many slices.
        axes: the mesh axes in order, their sizes filled in.
        model: the reference model; None for any.
        sharding: its rules as plain data; None for none.
        flag_sets: the sets of XLA flags that it asks for; None for those that fit every job.
        flags: XLA flags of its own.
        compiler: the version of what reads them where it runs, libtpu on TPUs and jaxlib on GPUs;
            None where the file does not say.
        wrap: for each dim of a slice whether it wraps; None where a table knows.
        run: what it starts; without a command where the file does not say.

    Example:
        >>> axes = {"dp": {"ici": -1}}
        >>> JobConfig.parse({"name": "x", "accelerator": "v5e:4x4", "axes": axes}).axes
        (JobAxis(name='dp', ici=16, dcn=1, weight=None),)
    """

    name: str
    accelerator: str
    num_slices: int
    axes: tuple[JobAxis, ...]
    model: str | None = None
    sharding: Sharding | None = field(default=None, hash=False)
    flag_sets: tuple[str, ...] | None = None
    flags: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    compiler: str | None = None
    wrap: tuple[bool, ...] | None = None
    run: Run = field(default_factory=Run)

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> "JobConfig":
        """Reads a job file.

        Args:
            path_or_name: a path, or the name of a job in tpu_configs/jobs.

        Returns:
            The job.

        Raises:
            MeshError: there is no such file, or what `parse` refuses.

        Warns:
            UserWarning: tensor parallelism over DCN.

        Example:
            >>> JobConfig.load("llama3_70b_h100").num_slices
            8
        """
        data, source = read_job_file(path_or_name)
        return _read(data, f"Job {source!r}")

    @classmethod
    def parse(cls, mapping: Mapping[str, object]) -> "JobConfig":
        """Reads a job from plain data.

        Args:
            mapping: what a job file says.

        Returns:
            The job.

        Raises:
            MeshError: unknown keys, an accelerator that there is not, axes that do not fit it,
                rules or flags that cannot be. The message names the nearest valid choice.

        Warns:
            UserWarning: tensor parallelism over DCN.
        """
        name: object = mapping.get("name") if isinstance(cast("object", mapping), Mapping) else None
        return _read(mapping, "Job" if name is None else f"Job {name!r}")

    @cached_property
    def _topology(self) -> Topology:
        return Topology.parse(self.accelerator, num_slices=self.num_slices, wrap=self.wrap)

    def topology(self) -> Topology:
        """The chips of the job.

        Returns:
            Its topology, with synthetic devices.
        """
        return self._topology

    @property
    def chip(self) -> Chip:
        """What is known of its chip."""
        return cast("Chip", self._topology.chip)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes, in order."""
        return tuple(axis.name for axis in self.axes)

    @property
    def ici_mesh_shape(self) -> tuple[int, ...]:
        """The size of each axis inside a slice."""
        return tuple(axis.ici for axis in self.axes)

    @property
    def dcn_mesh_shape(self) -> tuple[int, ...]:
        """The size of each axis across slices."""
        return tuple(axis.dcn for axis in self.axes)

    @property
    def weights(self) -> dict[str, float] | None:
        """Bytes that each axis gathers; None doubles them from axis to axis."""
        found = {axis.name: axis.weight for axis in self.axes if axis.weight is not None}
        return found or None

    def assignment(self) -> Assignment:
        """Searches the mesh whose axes have the best links.

        Returns:
            The mesh, what each axis gets in the model, and why.

        Raises:
            MeshError: the wrap of the slice is not known.

        Example:
            >>> JobConfig.load("llama3_8b_v5e").assignment().links
            (4.0,)
        """
        return assign(
            self._topology,
            self.ici_mesh_shape,
            self.dcn_mesh_shape,
            axis_names=self.axis_names,
            weights=self.weights,
        )

    def mesh(self, devices: Iterable[object] | None = None) -> HybridMesh:
        """Makes the mesh of the job, in the order that the search finds.

        Args:
            devices: those to make it of, in any order, such as jax.devices(); None for synthetic
                ones.

        Returns:
            The mesh; it knows which axes run over DCN.

        Raises:
            MeshError: devices that are not those of the job, or a wrap that is not known.

        Example:
            >>> JobConfig.load("llama3_405b_v6e_2slices").mesh().dcn_axes
            ('fsdp',)
        """
        return HybridMesh(
            self._topology.devices if devices is None else devices,
            ici_mesh_shape=self.ici_mesh_shape,
            dcn_mesh_shape=self.dcn_mesh_shape,
            axis_names=self.axis_names,
            order=self._order if self._topology.torus_rank else "row-major",
        )

    def xla_flags(self) -> tuple[XlaFlag, ...]:
        """The XLA flags of the job, each with its reason.

        Returns:
            The flags of its sets, then its own.

        Example:
            >>> str(JobConfig.load("llama3_70b_h100").xla_flags()[0])
            '--xla_gpu_enable_latency_hiding_scheduler=true'
        """
        return flags_for(self.chip, self.num_slices, self.flag_sets, self.flags)

    def environment(self) -> dict[str, str]:
        """The environment variables that carry its XLA flags.

        Returns:
            LIBTPU_INIT_ARGS on TPUs, XLA_FLAGS on GPUs; nothing where there are no flags.
        """
        return flag_environment(self.chip, self.xla_flags())

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed and costs much: tensor parallelism over DCN, with the modelled cost."""
        tp_axis = (self.sharding or {}).get("tp_axis", "tp")
        return tuple(
            over_dcn(f"Job {self.name!r}", axis, self.axis_names, self._topology)
            for axis in self.axes
            if axis.name == tp_axis and axis.dcn > 1
        )

    def check_valid(self) -> None:
        """States the invariants of a job.

        Raises:
            MeshError: the axes do not fit the chips, or there are no such flags.
        """
        sizes = {axis.name: {"ici": axis.ici, "dcn": axis.dcn} for axis in self.axes}
        read_axes(sizes, f"Job {self.name!r}", self._topology)
        self.xla_flags()

    def _order(self, devices: tuple[Device, ...], shape: tuple[int, ...]) -> DeviceArray:
        """The searched mesh of one slice, of given devices: they are found by their places."""
        one = replace(self._topology, num_slices=1, origin=((0, 0, 0),))
        whole = (1,) * len(shape)
        found = assign(one, shape, whole, axis_names=self.axis_names, weights=self.weights)
        low = np.min([device.coords or (0, 0, 0) for device in devices], axis=0)
        core = min(device.core_on_chip for device in devices)
        there: dict[tuple[int, ...], Device] = {}
        for device in devices:
            x, y, z = np.subtract(device.coords or (0, 0, 0), low).tolist()
            there[x, y, z, device.core_on_chip - core] = device
        made = np.empty(len(devices), object)
        for place, wanted in enumerate(cast("list[Device]", found.devices.reshape(-1).tolist())):
            at = (*(wanted.coords or (0, 0, 0)), wanted.core_on_chip)
            if at not in there:
                raise JobError(
                    f"The mesh of job {self.name!r} was asked for on given devices. No device of "
                    f"a slice is core {at[3]} of the chip at {at[:3]} from its first one, and "
                    f"{one.name} has such a device. Pass devices of whole slices of {one.name}."
                )
            made[place] = there[at]
        return made.reshape(shape)


def _read(data: object, asked: str) -> JobConfig:
    given = read_keys(data, _KEYS, asked)
    accelerator = read_accelerator(given.get("accelerator"), asked)
    wrap = read_wrap(given.get("wrap"), asked)
    slices = cast("int | None", given.get("num_slices"))  # Topology says what is no number
    topology = Topology.parse(accelerator, num_slices=slices, wrap=wrap)
    axes = read_axes(given.get("axes"), asked, topology)
    reader = COMPILERS[cast("Chip", topology.chip).platform]
    sets, flags, compiler = read_flags(given.get("xla_flags"), asked, reader)
    model = given.get("model")
    job = JobConfig(
        name=read_text(given.get("name"), "name", asked, "llama3-70b"),
        accelerator=accelerator,
        num_slices=topology.num_slices,
        axes=axes,
        model=None if model is None else read_text(model, "model", asked, "llama3-70b"),
        sharding=read_sharding(given.get("sharding"), asked, [axis.name for axis in axes]),
        flag_sets=sets,
        flags=flags,
        compiler=compiler,
        wrap=wrap,
        run=read_run(given.get("run"), asked),
    )
    job.xla_flags()
    for line in job.warnings:
        python_warnings.warn(line, UserWarning, stacklevel=3)
    return job
