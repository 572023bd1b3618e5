"""A user's file: type checkers accept it, but for the lines that say which error they must find."""

import numpy as np
import torch

import attention_core as ac
import attention_torch
from attention_conformance import CASES, Result, check
from attention_core import Attention, Causal, Dropout, KeyLengths, Mask, scaled_dot_product_attention
from attention_core.initializers import normal
from attention_core.layers import EncoderLayer, MultiHeadAttention
from attention_core.parameters import Linear
from attention_files.safetensors import load_layer, save_layer

version: str = ac.__version__
x = np.zeros((2, 4, 6, 8))
mask: Mask = Causal() & KeyLengths(np.array([6, 0])) | ~Causal(offset=2)
result: Attention = scaled_dot_product_attention(x, x, x, mask=mask, return_weights=True)
output = scaled_dot_product_attention(x, x, x, is_causal=True, dropout=Dropout(0.1, 3))
weights = result.weights
drawn = normal(0, (2, 3), xp=np)
layer = EncoderLayer(8, 2, 16, dropout=0.1)
parameters = layer.init(0, xp=np)
y = layer(parameters, x[0], xp=np)
linear = Linear(drawn, None)
save_layer("layer.safetensors", layer, parameters)
definition, loaded, state = load_layer("layer.safetensors")
found: list[Result] = check(scaled_dot_product_attention, backend="numpy", cases=CASES[:1])
passed = [each.passed for each in found]
module = attention_torch.MultiHeadAttention(8, 2)
attended = module(torch.zeros(1, 5, 8))
again: attention_torch.MultiHeadAttention = attention_torch.MultiHeadAttention.from_numpy(layer, *module.to_numpy())
held: attention_torch.Layer = attention_torch.load("layer.safetensors").with_settings(arithmetic="reproducible")

scaled_dot_product_attention(x, x, x, is_casual=True)  # error: is_casual
MultiHeadAttention(8, "two")  # error: int
wrong: int = ac.__version__  # error: int
ac.scaled_dot_attention(x, x, x)  # error: scaled_dot_attention
Causal(offset="no").blocks_of_nothing()  # error: blocks_of_nothing
mistaken = found[0].pased  # error: pased
attention_torch.MultiHeadAtention(8, 2)  # error: MultiHeadAtention
