"""Reference models in plain PyTorch, and their training as a job compiles it (``training.py``).

Llama 3 8B, 70B and 405B and Mixtral 8x7B; their sizes are in ``tpu_configs/models.yaml``. Nothing
of the library imports them, and reports take their lines for a user's.
"""
