"""Reference models in plain PyTorch, and their training as a job compiles it (``training.py``)."""
