"""An encoder and a decoder as somebody would port them to PyTorch: right, or with one mistake."""

import math

import torch


def linear(tree, *, transposed=False, bias=True):
    weight = torch.from_numpy(tree.weight.copy())
    made = torch.nn.Linear(weight.shape[0], weight.shape[1], bias=tree.bias is not None and bias)
    made.weight.data = weight if transposed else weight.T.contiguous()
    if made.bias is not None:
        made.bias.data = torch.from_numpy(tree.bias.copy())
    return made


def layer_norm(tree, epsilon):
    made = torch.nn.LayerNorm(len(tree.scale), eps=epsilon)
    made.weight.data, made.bias.data = (torch.from_numpy(each.copy()) for each in tree)
    return made


class Attention(torch.nn.Module):
    is_fused = False  # by a function whose heads can be seen

    def __init__(self, tree, heads, groups, mistake, rotary=None):
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(each) for each in tree[:4])
        if mistake == "query-key-swapped":
            self.q, self.k = self.k, self.q
        self.heads, self.groups, self.mistake, self.rotary = heads, groups, mistake, rotary
        if mistake == "transposed-weight":
            self.o = linear(tree.output, transposed=True)

    def split(self, x, heads):
        if self.mistake == "head-order":
            return x.unflatten(-1, (-1, heads)).movedim(-1, 1)
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def forward(self, x, mask):
        query, key, value = (
            self.split(self.q(x), self.heads),
            self.split(self.k(x), self.groups),
            self.split(self.v(x), self.groups),
        )
        if self.rotary is not None:
            query, key = (rotated(each, self.rotary, self.mistake == "rotary-pairs") for each in (query, key))
        count = self.heads // self.groups
        apart = self.mistake == "grouped-heads"
        key, value = (
            each.repeat(1, count, 1, 1) if apart else each.repeat_interleave(count, 1) for each in (key, value)
        )
        scale = 1.0 if self.mistake == "scale" else 1 / math.sqrt(query.shape[-1])
        if self.is_fused:
            heads = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        else:
            heads = (query @ key.mT * scale).masked_fill(~mask, -1e9).softmax(-1) @ value
        return self.o(
            heads.reshape((*x.shape[:-1], -1)) if self.mistake == "joined-heads" else heads.transpose(1, 2).flatten(2)
        )


def rotated(x, base, pairs):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b = (x[..., 0::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
    both = a * cos - b * sin, b * cos + a * sin
    return torch.stack(both, -1).flatten(-2) if pairs else torch.cat(both, -1)


class EncoderBlock(torch.nn.Module):
    def __init__(self, definition, tree, mistake):
        super().__init__()
        epsilon = 1e-3 if mistake == "epsilon" else definition.epsilon
        self.attention = Attention(tree.attention, definition.num_heads, definition.num_heads, mistake)
        self.norm1, self.norm2 = (layer_norm(each, epsilon) for each in (tree.attention_norm, tree.feed_forward_norm))
        self.up = linear(tree.feed_forward.expand, bias=mistake != "missing-bias")
        self.act = torch.nn.GELU("tanh" if mistake == "kind-of-gelu" else "none")
        self.down = linear(tree.feed_forward.contract)

    def forward(self, x, mask):
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.down(self.act(self.up(x))))


class Encoder(torch.nn.Module):
    """The layers, of vectors of tokens."""

    def __init__(self, definitions, trees, mistake=""):
        super().__init__()
        (embeddings, *layers), (tables, *trees) = definitions, trees
        self.words, self.places, self.types = (
            torch.nn.Embedding.from_pretrained(torch.from_numpy(each.copy())) for each in tables[:3]
        )
        self.norm = layer_norm(tables.norm, embeddings.epsilon)
        self.blocks = torch.nn.ModuleList(EncoderBlock(*pair, mistake) for pair in zip(layers, trees, strict=True))
        self.mistake = mistake

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[:, None, None, :] != 0
        mask = ~mask if self.mistake == "mask-sense" else mask
        x = (
            self.words(input_ids)
            + self.places(torch.arange(input_ids.shape[1]) + (self.mistake == "positions"))
            + self.types(torch.zeros_like(input_ids))
        )
        x = self.norm(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mistake == "dtype"):
            for block in self.blocks:
                x = block(x, mask)
        return x.float()


class Bare(torch.nn.Module):
    """A model of which nothing is seen but its output, as of functions of arrays."""

    def __init__(self, model):
        super().__init__()
        self.inside = [model.eval()]

    def forward(self, input_ids, attention_mask):
        return self.inside[0](input_ids, attention_mask)


class BareDecoder(Bare):
    def forward(self, input_ids):
        return self.inside[0](input_ids)


class RMSNorm(torch.nn.Module):
    def __init__(self, scale, epsilon):
        super().__init__()
        self.scale, self.epsilon = torch.nn.Parameter(torch.from_numpy(scale.copy())), epsilon

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.scale


class DecoderBlock(torch.nn.Module):
    def __init__(self, definition, tree, mistake):
        super().__init__()
        heads, groups = definition.num_heads, definition.num_key_value_heads or definition.num_heads
        epsilon = 1e-3 if mistake == "epsilon" else definition.epsilon
        self.attention = Attention(tree.attention, heads, groups, mistake, definition.rotary_base)
        self.norm1, self.norm2 = (RMSNorm(each, epsilon) for each in (tree.attention_norm, tree.feed_forward_norm))
        self.gate, self.up, self.down = (linear(each) for each in tree.feed_forward)

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        h = self.norm2(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


class Decoder(torch.nn.Module):
    def __init__(self, definition, tree, mistake=""):
        super().__init__()
        self.tokens = torch.nn.Embedding.from_pretrained(torch.from_numpy(tree.token.copy()))
        self.blocks = torch.nn.ModuleList(DecoderBlock(definition, each, mistake) for each in tree.layers)
        self.norm, self.mistake = RMSNorm(tree.norm, definition.epsilon), mistake

    def forward(self, input_ids):
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool)
        mask = mask if self.mistake == "mask-sense" else mask.tril()
        x = self.tokens(input_ids) * (self.tokens.embedding_dim**0.5 if self.mistake == "embedding-scale" else 1)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x) @ self.tokens.weight.T
