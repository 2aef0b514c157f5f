"""Runnable examples: ``python -m examples.train_lm --help`` from the project's folder."""
