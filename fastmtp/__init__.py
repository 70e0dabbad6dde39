"""Recursive fine-tuning of a language model's own multi-token-prediction (MTP) head, as vLLM serves it.

A library and a command line. Importing this package loads nothing heavy: torch is imported only by the modules that
compute.
"""

__version__ = "0.1.0"
