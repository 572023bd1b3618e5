"""Language models of transformers, with their weights read by the layouts, against transformers itself in float64."""

import numpy as np
import pytest

from attention_core.backend import get_backend
from attention_models import layouts
from attention_models.gguf import load_gguf

pytestmark = pytest.mark.needs("torch", "transformers")
SIZES = {
    "vocab_size": 37, "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 4, "rms_norm_eps": 1e-5, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_theta": 500.0},
    "smollm": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 4},
    "mistral": {"sliding_window": 4, "head_dim": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0, "head_dim": None},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {"sliding_window": 3, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 3.0,
               "final_logit_softcapping": 2.0, "head_dim": 8},
    "gemma": {"hidden_act": "gelu", "attention_bias": True},
    "phi3": {"sliding_window": 3, "rope_theta": 700.0, "head_dim": None, "hidden_act": "gelu_new"},
    "phi3, half of a head": {"partial_rotary_factor": 0.5, "head_dim": 8},
    "qwen2, full layers first": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "head_dim": None},
    "qwen3, layer types": {"use_sliding_window": True, "sliding_window": 2, "rope_theta": 50.0,
                           "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "llama, linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama, llama3": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                       "original_max_position_embeddings": 64}, "head_dim": 16, "rope_theta": 90.0},
    "llama, yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, "head_dim": 16},
    "qwen3, yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 3.0, "beta_fast": 2, "beta_slow": 0.5, "truncate": False,
                    "mscale": 1.5, "mscale_all_dim": 0.7, "rope_theta": 60.0}, "head_dim": 16, "max_position_embeddings": 32},
    "gemma2, yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.8}, "query_pre_attn_scalar": 9,
                     "sliding_window": 3},
    "llama, longrope": {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.5], "long_factor": [1.0, 2.5],
                                         "original_max_position_embeddings": 16}},
    "llama, partial factor": {"partial_rotary_factor": 0.5},  # which transformers reads of Phi 3 alone
}  # fmt: skip


@pytest.fixture
def wide(monkeypatch):
    """Transformers normalizes, rotates and exponentiates in float32, whatever the type of the model: not so here."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch._inductor.compile_fx")  # whose tables of types would be filled with the wrong one
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield torch
    torch.set_default_dtype(before)


def model_of(name, torch, transformers):
    options = {"model_type": name.partition(",")[0]} | SIZES | CONFIGS[name]
    kind = options.pop("model_type")
    options = {key: value for key, value in options.items() if value is not None}
    config = transformers.AutoConfig.for_model(kind, **options)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64) * 0.3
    return config, model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_transformers(name, wide):
    import transformers

    torch = wide
    config, model = model_of(name, torch, transformers)
    ids = torch.tensor([[5, 1, 22, 7, 30, 2, 9], [4, 4, 8, 19, 36, 11, 3]])
    arrays = dict(model.named_parameters())
    definition, tree = layouts.from_causal_lm(arrays, config=config.to_dict())
    expected = model(ids, use_cache=False).logits
    found = definition(tree, ids)
    size = float(expected.detach().abs().max())
    assert float((found - expected).detach().abs().max()) < 1e-12 * size
    target = torch.randn(expected.shape, dtype=torch.float64)
    wanted, got = (torch.autograd.grad((y * target).sum(), list(arrays.values())) for y in (expected, found))
    for key, one, other in zip(arrays, wanted, got, strict=True):
        assert float((one - other).abs().max()) <= 1e-11 * max(1.0, float(one.abs().max())), key

    written, again = layouts.LAYOUTS["causal-lm"].arguments(definition), layouts.to_causal_lm(definition, tree)
    if written["model_type"] == config.model_type:
        assert set(again) == set(arrays)
        for key, array in arrays.items():
            assert float((again[key] - array).detach().abs().max()) < 1e-15, key
    kind = written.pop("model_type")
    other = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, pad_token_id=0, **written)
    )
    other.double().eval().load_state_dict(again, strict=not definition.tied)
    assert float((other(ids, use_cache=False).logits - expected).detach().abs().max()) < 1e-12 * size


PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("smollm", {"attention.causal": True, "expert_count": 0}),
        ("llama, linear", {"rope.scaling.factor": 4.0}),
        ("llama, linear", {"rope.scale_linear": 4.0, "rope.scaling.type": "linear"}),
        ("smollm", {"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}),
        ("llama, yarn", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}),
        ("llama, llama3", {"rope.freq_base": 90.0}),
    ],
)  # fmt: skip
def test_a_gguf_file_has_the_logits_of_transformers(name, values, wide, tmp_path):
    """Its rotary pairs are neighbours, as llama.cpp has them; those of transformers and here are halves of a head."""
    import gguf
    import transformers

    config, model = model_of(name, wide, transformers)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads] * config.num_hidden_layers)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    kinds = {float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool, str: writer.add_string}
    for key, value in values.items():
        kinds[type(value)](f"llama.{key}", value)
    if "llama3" in name:  # as a tensor of divisors
        rotary, pairs = model.model.rotary_emb, config.head_dim // 2
        plain = 90.0 ** (-wide.arange(pairs, dtype=wide.float64) / pairs)
        divisors = (plain / rotary.inv_freq).numpy().astype(np.float32)
        assert divisors.min() == 1 < divisors.max()
        rotary.inv_freq = plain / wide.from_numpy(divisors.astype(np.float64))
        writer.add_tensor("rope_freqs.weight", divisors)
    for parameter_name, parameter in model.named_parameters():
        array = parameter.detach().numpy().astype(np.float32)
        parameter.data = wide.from_numpy(array.astype(np.float64))
        foreign = parameter_name
        for theirs, ours in PARTS.items():
            foreign = foreign.replace(theirs, ours)
        if "attn_q" in foreign or "attn_k" in foreign:
            array = array.reshape(-1, 2, config.head_dim // 2, config.hidden_size).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(foreign, np.ascontiguousarray(array))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    definition, tree, _ = load_gguf(tmp_path / "a.gguf")
    definition = definition.with_settings(epsilon=config.rms_norm_eps)  # which the file rounds to float32
    ids = wide.tensor([[5, 1, 22, 7, 30, 2, 9], [4, 4, 8, 19, 36, 11, 3]])
    found, expected = definition(get_backend("torch").from_numpy(tree, dtype="float64"), ids), model(ids).logits
    assert float((found - expected).detach().abs().max()) < 1e-12 * float(expected.detach().abs().max())
    written = layouts.to_causal_lm(definition, tree)
    assert set(written) == {name for name, _ in model.named_parameters()}
    for parameter_name, parameter in model.named_parameters():
        np.testing.assert_array_equal(written[parameter_name], parameter.detach().numpy(), err_msg=parameter_name)
