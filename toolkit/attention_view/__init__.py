"""Attention and masks to look at: one HTML file without network, and text for a terminal."""

from attention_view.masks import view_mask
from attention_view.sources import Computed
from attention_view.views import View
from attention_view.weights import view

__all__ = ["Computed", "View", "view", "view_mask"]
