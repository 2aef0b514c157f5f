"""Trainers that people use, on a mesh: one file per client, each imported only when asked for.

========================  ==========================================================
module                    what it has
========================  ==========================================================
integrations.accelerate   :class:`~xla_dtensor.integrations.accelerate.XDAccelerator`
integrations.transformers :class:`~xla_dtensor.integrations.transformers.XDTrainer`
integrations.trl          :class:`~xla_dtensor.integrations.trl.XDSFTTrainer`
integrations.lightning    ``XDStrategy`` and ``XDFabricStrategy``
integrations.generation   :func:`~xla_dtensor.integrations.generation.compile_generate`
integrations.torchtitan   :class:`~xla_dtensor.integrations.torchtitan.XDTrainer`
========================  ==========================================================

How weights and rows lie they have from :mod:`xla_dtensor.nn.model_plan`.

What they share is one idea. A client's loop, its counters, callbacks, loggers and data loaders stay
what they are, on the host; what it does to tensors between two batches is one compiled program.
"""
