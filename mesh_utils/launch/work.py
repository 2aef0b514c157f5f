"""Work: a job, with what it is to run."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from mesh_utils.devices import shape_text
from mesh_utils.errors import JobError
from mesh_utils.job import JobConfig

PREEMPTED = 75
"""The exit status of a program that was told to end, and has saved: start it again."""


@dataclass(frozen=True)
class Work:
    """What a launcher gets.

    Attributes:
        job: the job.
        name: its name, as Kubernetes and Cloud take it.
        command: the words of what runs.
        image: the container image; None for none.
        env: environment variables, those of XLA flags first.
        options: what only one launcher knows.
    """

    job: JobConfig
    name: str
    command: tuple[str, ...]
    image: str | None
    env: Mapping[str, str]
    options: Mapping[str, str]

    @property
    def hosts(self) -> int:
        """Hosts of all slices."""
        return self.job.topology().num_hosts

    @property
    def hosts_per_slice(self) -> int:
        """Hosts of one slice."""
        return self.hosts // self.job.num_slices

    @property
    def chips_per_host(self) -> int:
        """Chips of a host that the job uses."""
        return prod(self.job.topology().chips_per_host)

    @property
    def shape(self) -> str:
        """The shape of a slice, as Cloud writes it."""
        return shape_text(self.job.topology().shape, self.job.chip.torus_rank)

    @property
    def title(self) -> str:
        """A line that says what the job is."""
        hosts = f"{self.hosts} host{'' if self.hosts == 1 else 's'}"
        axes = ", ".join(map(str, self.job.axes))
        return f"Job {self.job.name!r}: {self.job.topology().name}, {hosts}, {axes}"

    @property
    def partition(self) -> str:
        """Shell for the number of a GPU's slice, from that of its node in NODE; "" for one slice.

        JAX takes each process for a slice of its own, or all for one, unless it is told.
        """
        if self.job.num_slices == 1:
            return ""
        return f'export JAX_PARTITION_INDEX="$((NODE / {self.hosts_per_slice}))"'

    @property
    def grace_seconds(self) -> int:
        """From the signal to end until a process is killed."""
        return self.count("grace_seconds", self.job.run.grace_seconds)

    def count(self, option: str, otherwise: int = 0) -> int:
        """Reads an option that is a number.

        Args:
            option: its name.
            otherwise: what it is where nobody says.

        Returns:
            The number.

        Raises:
            JobError: it is none.
        """
        text = self.options.get(option, str(otherwise))
        if not (text.isascii() and text.isdecimal()):
            raise JobError(
                f"Job {self.job.name!r} was to be launched with {option}={text!r}. That is no "
                f"number. Pass such as {option}='3'."
            )
        return int(text)

    def needed_image(self, launcher: str) -> str:
        """The image, where there has to be one.

        Args:
            launcher: what needs it.

        Returns:
            The image.

        Raises:
            JobError: none was passed.
        """
        if self.image is None:
            raise JobError(
                f"Job {self.job.name!r} was to be launched with {launcher!r}, without an image. "
                "Pods run container images. Pass image=, such as "
                "image='us-docker.pkg.dev/project/repository/train:1'."
            )
        return self.image
