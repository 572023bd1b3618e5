"""Attention on PyTorch."""

from attention_torch.backend import backend

__all__ = ["backend"]
