"""A user's file: type checkers accept it, but for the lines that say which error they must find."""

from typing import TypeAlias, assert_type

import numpy as np
import torch
from numpy.typing import NDArray

import attention_core as ac
import attention_torch
from attention_conformance import CASES, Finding, check
from attention_core import Attention, Causal, Dropout, KeyLengths, Mask, scaled_dot_product_attention
from attention_core.initializers import normal
from attention_core.layers import EncoderLayer, MultiHeadAttention
from attention_core.parameters import Linear, MultiHeadAttention as Projections
from attention_files.safetensors import load_layer, save_layer

version: str = ac.__version__
Arrays: TypeAlias = NDArray[np.float64]
x: Arrays = np.zeros((2, 4, 6, 8))
mask: Mask = Causal() & KeyLengths(np.array([6, 0])) | ~Causal(offset=2)
result = assert_type(scaled_dot_product_attention(x, x, x, mask=mask, return_weights=True), Attention)
output = assert_type(scaled_dot_product_attention(x, x, x, is_causal=True, dropout=Dropout(0.1, 3)), Arrays)
with_logsumexp = assert_type(scaled_dot_product_attention(x, x, x, return_logsumexp=True), Attention)
tensor = assert_type(scaled_dot_product_attention(*(torch.zeros(2, 3, 4),) * 3, scale=0.5), torch.Tensor)
flag = bool(output.size)
either = scaled_dot_product_attention(x, x, x, return_weights=flag)
same = Linear(np.eye(8))
heads = Projections(same, same, same)
joined = ac.multi_head_attention(heads, output, num_heads=2)
mapped = ac.functions.linear(same, output)
kept = ac.cache.empty_cache((2,), 4, 6, 8, xp=np)
weights = result.weights
drawn = normal(0, (2, 3), xp=np)
layer = EncoderLayer(8, 2, 16, dropout=0.1)
parameters = layer.init(0, xp=np)
y = layer(parameters, x[0], xp=np)
linear = Linear(drawn, None)
save_layer("layer.safetensors", layer, parameters)
definition, loaded, state = load_layer("layer.safetensors")
found: list[Finding] = check(scaled_dot_product_attention, backend="numpy", cases=CASES[:1])
passed = [each.passed for each in found]
module = attention_torch.MultiHeadAttention(8, 2)
attended = module(torch.zeros(1, 5, 8))
again: attention_torch.MultiHeadAttention = attention_torch.MultiHeadAttention.from_numpy(layer, *module.to_numpy())
held: attention_torch.Layer = attention_torch.load("layer.safetensors").with_settings(arithmetic="reproducible")

scaled_dot_product_attention(x, x, x, is_casual=True)  # error: scaled_dot_product_attention
wide: str = scaled_dot_product_attention(x, x, x)  # error: str
pair: str = scaled_dot_product_attention(x, x, x, return_weights=True)  # error: Attention
MultiHeadAttention(8, "two")  # error: int
wrong: int = ac.__version__  # error: int
ac.scaled_dot_attention(x, x, x)  # error: scaled_dot_attention
Causal(offset="no").blocks_of_nothing()  # error: blocks_of_nothing
mistaken = found[0].pased  # error: pased
attention_torch.MultiHeadAtention(8, 2)  # error: MultiHeadAtention
