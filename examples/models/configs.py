"""Sizes of the reference models: Llama 3 8B, 70B and 405B, Mixtral 8x7B, and tiny ones for tests.

The figures are in ``tpu_configs/models.yaml``, each under its source, and are read without torch:
a plan can be made where it is not installed.

    >>> {name: f"{ModelSizes.load(name).num_parameters / 1e9:.2f}e9" for name in model_names()[:2]}
    {'llama3-8b': '8.03e9', 'llama3-70b': '70.55e9'}
"""

from __future__ import annotations

from xla_dtensor.model_sizes import ModelSizes, RopeScaling, model_names

__all__ = ["ModelSizes", "RopeScaling", "model_names"]
