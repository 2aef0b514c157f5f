"""Trainers that people use, on a mesh: one file per client, each imported only when asked for.

========================  ==========================================================
module                    what it has
========================  ==========================================================
integrations.accelerate   :class:`~xla_dtensor.integrations.accelerate.XDAccelerator`
integrations.transformers :class:`~xla_dtensor.integrations.transformers.XDTrainer`
integrations.trl          :class:`~xla_dtensor.integrations.trl.XDSFTTrainer`
integrations.lightning    ``XDStrategy`` and ``XDFabricStrategy``
integrations.torchtitan   :class:`~xla_dtensor.integrations.torchtitan.XDTrainer`
integrations.model_plan   how a model's weights and a batch's rows lie on a mesh
========================  ==========================================================

What they share is one idea. A client's loop, its counters, callbacks, loggers and data loaders stay
what they are, on the host; what it does to tensors between two batches is one compiled program.
"""
