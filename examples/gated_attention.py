"""The gated attention of deepmd-kit (`deepmd.dpmodel`), said with public functions, and compared with theirs.

``pip install deepmd-kit``, then ``python examples/gated_attention.py``. A switch s falls to 0 with the distance
of a neighbour, and smooths scores. A factor *after* the softmax has the switch again, and the directions r:

    o_i = sum_j p_ij s_i s_j (r_i . r_j) v_j,    p_i = softmax_j((a q_i . k_j + c) s_i s_j - c)

Nothing of that needs an option of its own:

* The switch multiplies queries and keys, and what is left of c is a bias.
* A factor of low rank after the softmax is a wider value: the average of v_j r_j, of 3 times the width, times r_i.

It is float64, as forces are gradients of it. Reproducible arithmetic refuses float64, in which its sums are exact: for
equal bits, give it float32.
"""

import array_api_compat
import numpy as np

from attention_core import merge_heads, scaled_dot_product_attention, split_heads

SHIFT = 20.0


def gated_attention(x, neighbours, switch, directions, *, weights, num_heads, scale):
    """Features (frames, M, C) and neighbours (frames, M), switch (frames, M), directions (frames, M, 3)."""
    xp = array_api_compat.array_namespace(x)
    into, into_bias, out, out_bias = (xp.asarray(each, dtype=x.dtype) for each in weights)
    projected = xp.matmul(x, into) + into_bias
    width = projected.shape[-1] // 3
    parts = (split_heads(projected[..., n * width : (n + 1) * width], num_heads) for n in range(3))
    query, key, value = (each / xp.linalg.vector_norm(each, axis=-1, keepdims=True) for each in parts)

    smooth, directed = switch[:, None, :, None], directions[:, None, :, :, None]
    bias = SHIFT * (smooth * switch[:, None, None, :] - 1)
    wide = xp.reshape((value * smooth)[..., None, :] * directed, (*value.shape[:-1], -1))  # (frames, H, M, 3 D)
    output = scaled_dot_product_attention(query * smooth, key * smooth, wide, bias=bias, scale=scale)
    output = xp.sum(xp.reshape(output, (*value.shape[:-1], 3, -1)) * directed, axis=-2) * smooth
    output = xp.where(neighbours[:, None, :, None], output, xp.zeros_like(output))
    return xp.matmul(merge_heads(output), out) + out_bias


def main():
    import jax
    import torch
    from deepmd.dpmodel.descriptor.dpa1 import GatedAttentionLayer

    jax.config.update("jax_enable_x64", True)
    theirs = GatedAttentionLayer(nnei=7, embed_dim=10, hidden_dim=8, dotr=True, seed=1)
    weights = (theirs.in_proj.w, theirs.in_proj.b, theirs.out_proj.w, theirs.out_proj.b)
    rng = np.random.default_rng(0)
    x, directions = rng.normal(size=(5, 7, 10)), rng.normal(size=(5, 7, 3))
    neighbours = rng.random((5, 7)) < 0.8
    switch = rng.random((5, 7)) * neighbours
    for array in (np.asarray, jax.numpy.asarray, torch.asarray):
        arrays = [array(each) for each in (x, neighbours, switch, directions)]
        ours = gated_attention(*arrays, weights=weights, num_heads=1, scale=theirs.scaling)
        expected, _ = theirs(arrays[0], arrays[1], input_r=arrays[3], sw=arrays[2])
        difference = np.abs(np.asarray(ours) - np.asarray(expected)).max()
        print(f"{array.__module__.partition('.')[0]:6} {difference:.1e}")
        assert difference < 1e-10  # what they ask of their own frameworks


if __name__ == "__main__":
    main()
