"""Jobs of 8 chips for tests of the reference models."""

from __future__ import annotations

from mesh_utils import JobConfig

__all__ = ["JOBS", "job_like"]


def job_like(name: str, **axes: int) -> JobConfig:
    """A job of 8 chips with the rules of a shipped one."""
    shipped = JobConfig.load(name)
    ici = {axis: {"ici": size} for axis, size in axes.items()}
    return JobConfig.parse(
        {
            "name": "tiny",
            "accelerator": "v6e:2x4",
            "axes": ici,
            "sharding": dict(shipped.sharding or {}),
        }
    )


JOBS = {
    "llama-tiny": job_like("llama3_70b_v5p", fsdp=2, tp=4),
    "mixtral-tiny": job_like("mixtral_8x7b_v5p", fsdp=2, ep=4),
}
