"""Language models in GGUF files, of seven tokens and one layer."""

import numpy as np

LLAMA = {
    "embedding_length": 8, "feed_forward_length": 6, "block_count": 1, "attention.head_count": 2,
    "attention.head_count_kv": 1,
}  # fmt: skip


def write_gguf(path, *, architecture="llama", left_out=(), shapes=(), more=(), values=(), more_values=()):
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for name, value in (LLAMA | dict(values)).items():
        kinds[type(value)](f"{architecture}.{name}", value)
    for name, value in dict(more_values).items():
        kinds[type(value)](name, value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    dims = {
        "token_embd.weight": (7, 8), "output_norm.weight": (8,), "blk.0.attn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8), "blk.0.attn_k.weight": (4, 8), "blk.0.attn_v.weight": (4, 8),
        "blk.0.attn_output.weight": (8, 8), "blk.0.ffn_norm.weight": (8,), "blk.0.ffn_gate.weight": (6, 8),
        "blk.0.ffn_up.weight": (6, 8), "blk.0.ffn_down.weight": (8, 6),
    } | dict(shapes) | dict.fromkeys(more, (3,))  # fmt: skip
    rng, arrays = np.random.default_rng(4), {}
    for name, size in dims.items():
        if name not in left_out:
            arrays[name] = rng.standard_normal(size).astype(np.float32)
            writer.add_tensor(name, arrays[name])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return arrays
