"""A real model as an example: `weir serve examples.minilm:MiniLM`."""

from .model import MiniLM

__all__ = ["MiniLM"]
