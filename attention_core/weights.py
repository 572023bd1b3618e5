"""The weights of attention, computed for chosen queries, keys and heads, and recorded in whole models."""

from ._functions.weights import RecordedAttention, attention_weights, record_attention
from ._keywords import publish

__all__ = ["RecordedAttention", "attention_weights", "record_attention"]

publish(vars(), __all__)
