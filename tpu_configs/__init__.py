"""Data about TPU hardware and TPU jobs, as YAML. There is no code here.

`hardware/` holds one file per TPU generation or GPU node: memory, peak FLOP/s, interconnect, chips
per host, each figure with its source. `jobs/` holds one file per job: accelerator, slices and mesh
axes. `launch/` holds templates that start such a job.

Read the files through `mesh_utils`, which checks them. A tool that wants the raw text finds it with

    >>> import importlib.resources
    >>> folder = importlib.resources.files("tpu_configs")
"""
