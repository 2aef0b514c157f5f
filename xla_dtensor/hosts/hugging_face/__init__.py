"""Safetensors files of Hugging Face into sharded modules and out of them, a piece at a time.

:mod:`xla_dtensor.hosts.checkpoint.hugging_face` has the two calls. A load reads names and sizes
(``files``, ``names``), plans which bytes each process needs (``plan``, ``windows``), and places
them (``place``); a save gathers pieces (``gather``) and writes files that transformers loads
(``write``).
"""
