"""Language models of transformers, with their weights read by the layouts, against transformers itself in float64."""

import numpy as np
import pytest

from attention_core import get_backend, layers, layouts
from attention_numpy.gguf_files import load_gguf

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
}  # fmt: skip


@pytest.fixture
def wide(monkeypatch):
    """Transformers normalizes, rotates and exponentiates in float32, whatever the type of the model: not so here."""
    torch = pytest.importorskip("torch")
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield torch
    torch.set_default_dtype(before)


def model_of(name, torch, transformers):
    options = {"model_type": name} | SIZES | CONFIGS[name]
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

    again = layouts.to_causal_lm(definition, tree)
    assert set(again) == set(arrays)
    for key, array in arrays.items():
        assert float((again[key] - array).detach().abs().max()) < 1e-15, key
    assert layouts.decoder_from_config(layouts.LAYOUTS["causal-lm"].arguments(definition)) == definition


PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers": "blk",
}  # fmt: skip


def test_a_gguf_file_has_the_logits_of_transformers(wide, tmp_path):
    """Its rotary pairs are neighbours, as llama.cpp has them; those of transformers and here are halves of a head."""
    import transformers

    gguf = pytest.importorskip("gguf")
    config, model = model_of("smollm", wide, transformers)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy().astype(np.float32)
        parameter.data = wide.from_numpy(array.astype(np.float64))
        for theirs, ours in PARTS.items():
            name = name.replace(theirs, ours)
        if "attn_q" in name or "attn_k" in name:
            array = array.reshape(-1, 2, config.head_dim // 2, config.hidden_size).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(name, np.ascontiguousarray(array))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    definition, tree, _ = load_gguf(tmp_path / "a.gguf")
    definition = definition.with_settings(epsilon=config.rms_norm_eps)  # which the file rounds to float32
    ids = wide.tensor([[5, 1, 22, 7, 30, 2, 9], [4, 4, 8, 19, 36, 11, 3]])
    found, expected = definition(get_backend("torch").from_numpy(tree, dtype="float64"), ids), model(ids).logits
    assert float((found - expected).detach().abs().max()) < 1e-12 * float(expected.detach().abs().max())
    written = layouts.to_causal_lm(definition, tree)
    assert set(written) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(written[name], parameter.detach().numpy(), err_msg=name)


TINY = {"model_type": "llama", "vocab_size": 5, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
        "num_attention_heads": 2}  # fmt: skip


def test_what_is_no_such_model_is_refused():
    d = layouts.decoder_from_config(TINY)
    arrays = layouts.to_causal_lm(d, d.init(0, xp=np))
    read = layouts.from_causal_lm
    assert layers.named_arrays(read(arrays, config=TINY)[1])["layers.0.feed_forward.contract.weight"].shape == (6, 4)
    norm = "model.layers.0.input_layernorm.weight"
    cases = [
        (arrays | {norm: None}, TINY, f"expected {norm} of transformers.AutoModelForCausalLM"),
        ({k: a for k, a in arrays.items() if k != norm}, TINY, f"expected {norm} of transformers.AutoModelForCausalLM; got no such array"),
        (arrays | {"model.extra": np.ones(1)}, TINY, "expected nothing else of transformers.AutoModelForCausalLM; got model.extra"),
        (arrays | {norm: np.ones(3)}, TINY, rf"expected {norm} (4,) of transformers.AutoModelForCausalLM; got (3,)"),
        (arrays, TINY | {"model_type": "bloom"}, "expected a model_type out of llama, mistral, qwen2, qwen3, gemma2; got 'bloom'"),
        (arrays, TINY | {"rope_scaling": {"rope_type": "yarn"}}, "expected rotary positions of type default for transformers.AutoModelForCausalLM; got 'yarn'"),
        (arrays, {"model_type": "llama"}, "expected num_attention_heads in the config of transformers.AutoModelForCausalLM; got model_type"),
        (arrays, TINY | {"hidden_act": "mish"}, "expected an activation of transformers.AutoModelForCausalLM out of"),
        (arrays, TINY | {"tie_word_embeddings": True}, "expected lm_head.weight equal to the tied embedding; got another (5, 4)"),
    ]  # fmt: skip
    for spoiled, config, message in cases:
        with pytest.raises(layouts.LayoutError) as caught:
            read(spoiled, config=config)
        assert str(caught.value).startswith(message)
