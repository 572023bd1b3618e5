"""An encoder of transformers on this attention, against its own ``sdpa``: ``python -m timed_steps encoder``.

It is a BERT of random weights, as wide as BERT-base, of four layers: a batch of 32 × 128 tokens in float32, without
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from timed_steps import Order, Pair

BATCH, LENGTH, LAYERS = 32, 128, 4
Forward = Callable[[], Any]


def forwards(batch: int = BATCH, length: int = LENGTH, **settings: Any) -> dict[str, tuple[Forward, Forward]]:
    """Forward passes by padding: on this attention, and on ``sdpa``."""
    import torch  # noqa: PLC0415 (who times no PyTorch does without)
    from transformers import BertConfig, BertModel  # noqa: PLC0415

    import attention_models.torch.transformers  # noqa: PLC0415

    attention_models.torch.transformers.register()
    model = BertModel(BertConfig(**{"num_hidden_layers": LAYERS} | settings)).eval()
    lengths = torch.linspace(length // 4, length, batch).long().unsqueeze(-1)
    full = torch.ones((batch, length), dtype=torch.int64)
    tokens = torch.arange(batch * length).reshape(batch, length) % model.config.vocab_size

    def forward(name: str, mask: Any) -> Forward:
        def run() -> Any:
            model.set_attn_implementation(name)
            with torch.no_grad():
                return model(tokens, attention_mask=mask).last_hidden_state

        return run

    masks = {"no padding": full, "a quarter to all of the tokens": full * (torch.arange(length) < lengths)}
    return {name: (forward("attention_core", mask), forward("sdpa", mask)) for name, mask in masks.items()}


def pairs(order: Order) -> Iterator[Pair]:
    """The passes of both."""
    for name, both in forwards().items():
        if order.takes(name):
            yield Pair(name, *both)
