"""Models of transformers on this attention, by ``attn_implementation="attention_core"``.

The reference is transformers' own eager attention. It computes the softmax of most families in float32, also for models
in float64. Here it gets one in float64, so that nothing but rounding is left between the two. Eager attention as it is
has NaN, or averages, in fully masked rows: the contract asks for 0, which is what attention-core gives.
"""

import importlib
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.needs("torch", "transformers"),
    # transformers and PyTorch announce what they deprecate in one another; none of it is about these numbers.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
COUPLED = {"vocab_size": 61, "d_model": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COUPLED |= {"decoder_start_token_id": 1, "forced_eos_token_id": None}
for part in ("encoder", "decoder"):
    COUPLED |= {f"{part}_layers": 2, f"{part}_ffn_dim": 40, f"{part}_attention_heads": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "experts_implementation": "eager"}
WINDOW = {"sliding_window": 5}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "Bert": ("BertModel", "BertConfig", SIZES),
    "GPT2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | WINDOW),
    "Gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        GROUPED | MIXED | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 7},
    ),
    "GptOss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        GROUPED | MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
    "Qwen2Moe": (  # which has a window of 0 where it has none
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        GROUPED | EXPERTS | {"num_experts": 4},
    ),
    "DeepseekV4": (  # which joins numbers to its masks, for the keys that it compresses
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        GROUPED
        | {"num_hidden_layers": 3, "num_key_value_heads": 1, "sliding_window": 5, "partial_rotary_factor": 0.5}
        | {"layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]}
        | {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}, "hc_mult": 2}
        | {"q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 2}
        | EXPERTS
        | {"n_routed_experts": 4},
    ),
    "DeepseekV32": (  # which tells the keys that it chooses to all but its own attention
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        SIZES
        | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 3}
        | {"first_k_dense_replace": 2, "num_key_value_heads": 4},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 61, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
    ),
    "Bart": ("BartForConditionalGeneration", "BartConfig", COUPLED),
    "ViT": ("ViTModel", "ViTConfig", SIZES | {"image_size": 16, "patch_size": 4}),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        COUPLED
        | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 64}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}
WITHOUT_TOKENS = {"ViT", "Whisper"}  # so that there is nothing to pad
DECODERS = sorted(MODELS.keys() - {"Bert", "ViT", "Qwen2Moe", "DeepseekV4"})
PADDED = [
    (family, side)
    for family in MODELS
    for side in (None, "right", "left")
    if side is None or family not in WITHOUT_TOKENS
]
ATOL = 1e-12


@pytest.fixture(scope="module", autouse=True)
def adapter():
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    module = importlib.import_module("attention_models.torch.transformers")
    module.register()
    return module


def model_of(family, dtype=torch.float64, **changes):
    """A small model of random parameters, biases and normalizations too."""
    transformers = importlib.import_module("transformers")
    model, config, settings = MODELS[family]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**settings | changes)
    model = getattr(transformers, model)(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def inputs_of(family, length=11):
    ids = torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(3))
    if family == "ViT":
        return {"pixel_values": torch.linspace(-1, 2, 2 * 3 * 16 * 16, dtype=torch.float64).sin().reshape(2, 3, 16, 16)}
    if family == "Whisper":
        sound = torch.linspace(-9, 20, 2 * 8 * 20, dtype=torch.float64).sin().reshape(2, 8, 20)
        return {"input_features": sound, "decoder_input_ids": ids}
    return {"input_ids": ids} | ({"decoder_input_ids": ids[:, :7]} if family in ("T5", "Bart") else {})


def padding(side, length=11, count=3):
    mask = torch.ones((2, length), dtype=torch.int64)
    if side is not None:
        mask[0, slice(-count, None) if side == "right" else slice(count)] = 0
    return mask


def run(model, implementation, monkeypatch, call=None, **inputs):
    """Call a model with an implementation, its own softmax, of eager attention and of routers, in its dtype."""
    model.set_attn_implementation(implementation)
    softmax = torch.nn.functional.softmax
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim))
        return (call or model)(**inputs)


def values_of(outputs):
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state


def outcome(model, implementation, monkeypatch, **inputs):
    """Values at real tokens, gradients of all parameters, and weights, of one call."""
    outputs = run(model, implementation, monkeypatch, output_attentions=True, **inputs)
    values, mask = values_of(outputs), inputs.get("attention_mask")
    if mask is not None and mask.shape == values.shape[:2]:
        values = values * mask.unsqueeze(-1)
    gradients = torch.autograd.grad(values.sin().sum(), trained(model), allow_unused=True)
    fields = "attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"
    weights = [each for name in fields for each in getattr(outputs, name, None) or ()]
    return values.detach(), torch.cat([each.flatten() for each in gradients if each is not None]), weights


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def close(actual, expected, atol=ATOL):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("family", "side"), PADDED)
def test_models_give_the_numbers_of_eager_attention(family, side, monkeypatch):
    model, inputs = model_of(family), inputs_of(family)
    if side is not None:
        inputs["attention_mask"] = padding(side)
    expected = outcome(model, "eager", monkeypatch, **inputs)
    found = outcome(model, "attention_core", monkeypatch, **inputs)
    close(found[0], expected[0])
    close(found[1] / expected[1].abs().max(), expected[1] / expected[1].abs().max())
    assert len(found[2]) == len(expected[2]) >= 2
    for ours, theirs in zip(found[2], expected[2], strict=True):
        attended = ours.sum(dim=-1, keepdim=True) > 0  # a fully masked row has weights of 0, and an average in eager
        close(ours, torch.where(attended, theirs, 0))
        assert bool(attended.all()) == (side != "left" or ours.shape[-2] != 11 or family in ("Bert", "T5", "Bart"))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", DECODERS)
def test_generation_chooses_the_tokens_of_eager_attention(family, cache, monkeypatch):
    model, inputs = model_of(family), inputs_of(family)
    inputs.pop("decoder_input_ids", None)
    if family not in WITHOUT_TOKENS:
        inputs["attention_mask"] = padding("left")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    expected, found = (
        run(model, name, monkeypatch, model.generate, **inputs, **options) for name in ("eager", "attention_core")
    )
    assert found.tolist() == expected.tolist()
    assert found.shape[-1] > 2


@pytest.mark.parametrize("length", [20, 300])
def test_packed_sequences_do_not_see_each_other(length, monkeypatch):
    model, first = model_of("Mistral", sliding_window=6), length // 3
    ids = torch.randint(3, 61, (1, length), generator=torch.Generator().manual_seed(5))
    positions = torch.cat([torch.arange(first), torch.arange(length - first)]).unsqueeze(0)
    packed = run(model, "attention_core", monkeypatch, input_ids=ids, position_ids=positions, use_cache=False).logits
    for part in (slice(first), slice(first, None)):
        close(packed[:, part], run(model, "attention_core", monkeypatch, input_ids=ids[:, part]).logits)


def masks_of(adapter, monkeypatch, model, call=None, **inputs):
    """The masks that attention was computed with, one for each layer."""
    seen, attention = [], adapter.scaled_dot_product_attention
    monkeypatch.setattr(
        adapter,
        "scaled_dot_product_attention",
        lambda *x, mask, **k: (seen.append(mask), attention(*x, mask=mask, **k))[1],
    )
    with torch.inference_mode():
        outputs = run(model, "attention_core", monkeypatch, call, **inputs)
    monkeypatch.undo()
    return seen, outputs


RULED = {  # a family, the side of the padding, whether sequences are packed, and the rules of its first layer
    "window": ("Mistral", None, False, {"Causal", "SlidingWindow"}),
    "padding and window": ("GptOss", "left", False, {"Causal", "SlidingWindow", "Given"}),
    "padding": ("Llama", "right", False, {"Causal", "Given"}),
    "packed": ("Mistral", None, True, {"Causal", "SlidingWindow", "Segments"}),
    "causal": ("Llama", None, False, set()),
}


@pytest.mark.parametrize("name", RULED)
def test_long_masks_are_rules_of_the_same_pairs(name, adapter, monkeypatch):
    family, side, is_packed, rules = RULED[name]
    model, inputs = model_of(family), inputs_of(family, length=300)
    if side is not None:
        inputs["attention_mask"] = padding(side, 300, 70)
    if is_packed:
        inputs |= {"position_ids": (torch.arange(300) % 110).expand(2, -1), "use_cache": False}
    masks, outputs = masks_of(adapter, monkeypatch, model, **inputs)
    assert {type(part).__name__ for part in parts_of(masks[0])} == rules
    real = inputs.get("attention_mask", torch.ones((2, 300))).bool()
    close(values_of(outputs)[real], values_of(run(model, "eager", monkeypatch, **inputs))[real].detach())


def parts_of(mask):
    if mask is None:
        return []
    return [*parts_of(mask.first), *parts_of(mask.second)] if type(mask).__name__ == "And" else [mask]


def test_a_static_cache_is_read_as_far_as_it_is_filled(adapter, monkeypatch):
    model, inputs = model_of("Llama"), inputs_of("Llama") | {"attention_mask": padding("left")}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    options["cache_implementation"] = "static"
    masks, _ = masks_of(adapter, monkeypatch, model, model.generate, **inputs, **options)
    ranges = [mask.bounds().numbers((2,))[0].high + 1 for mask in masks[2:6:2]]  # of one query, at position 0
    assert ranges == [12, 13]  # of 15 keys, after 11 of the prompt


def test_a_mask_that_a_model_writes_over_is_taken_as_it_is(adapter):
    masks = importlib.import_module("transformers.masking_utils")
    ids = torch.zeros((1, 300), dtype=torch.int64)
    function = masks.packed_sequence_mask_function(ids)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            options = {"batch_size": 1, "q_length": 300, "kv_length": 300, "allow_is_causal_skip": False}
            mask = adapter.make_mask(
                masks, mask_function=masks.and_masks(function, masks.causal_mask_function), **options
            )
            assert type(adapter._rule_of(mask, (300, 300))).__name__ == "And"
            assert adapter._rule_of(mask[:, :, :200], (200, 300)) is None
            mask[..., 0, 5] = True
            assert adapter._rule_of(mask, (300, 300)) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_masks_of_your_own_are_boolean_or_added(dtype, monkeypatch):
    model, inputs = model_of("Llama"), inputs_of("Llama")
    allowed = torch.rand((2, 1, 11, 11), generator=torch.Generator().manual_seed(2)) < 0.5
    allowed |= torch.eye(11, dtype=torch.bool)
    numbers = torch.linspace(-1, 1, 11, dtype=torch.float64) * (dtype != torch.bool)
    added = torch.where(allowed, numbers, torch.finfo(torch.float64).min)
    mask = allowed if dtype == torch.bool else added
    expected = run(model, "eager", monkeypatch, **inputs, attention_mask=added).logits
    close(run(model, "attention_core", monkeypatch, **inputs, attention_mask=mask).logits, expected)


def test_a_fully_masked_row_gives_the_same_by_either_mask(monkeypatch):
    allowed = torch.ones((2, 1, 11, 11), dtype=torch.bool).tril()
    allowed[1, :, 3] = False
    masks = (
        allowed,
        torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min),
    )
    model, inputs = model_of("Llama"), inputs_of("Llama")
    close(*(run(model, "attention_core", monkeypatch, **inputs, attention_mask=mask).logits for mask in masks))


def test_dropout_draws_its_seed_from_the_generator_of_torch(monkeypatch):
    model, inputs = model_of("Llama", attention_dropout=0.5).train(), inputs_of("Llama")

    def outcome_of(seed):
        torch.manual_seed(seed)
        values = run(model, "attention_core", monkeypatch, **inputs, use_cache=False).logits
        return values.detach(), torch.autograd.grad(values.sin().sum(), trained(model))

    (first, gradients), (again, _), (other, _) = outcome_of(1), outcome_of(1), outcome_of(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(map(torch.equal, outcome_of(1)[1], gradients))
    values = run(model.eval(), "attention_core", monkeypatch, **inputs).logits
    close(values, run(model, "eager", monkeypatch, **inputs).logits)
    attend, module = importlib.import_module("attention_models.torch.transformers").attend, torch.nn.Identity().eval()
    heads = [torch.linspace(-1, 1, 24).reshape(1, 2, 3, 4)] * 3
    assert torch.equal(attend(module, *heads, None, dropout=0.5)[0], attend(module, *heads, None)[0])


def test_models_compile_as_one_graph():
    model, inputs = model_of("Mistral", num_hidden_layers=1), inputs_of("Mistral") | {"attention_mask": padding("left")}
    model.set_attn_implementation("attention_core")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(compiled(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("family", ["Gemma2", "Bart"])
def test_reproducible_attention_is_that_of_the_core(family, adapter, monkeypatch):
    model, inputs = model_of(family, torch.float32), inputs_of(family) | {"attention_mask": padding("right")}
    calls, attention = [], adapter.scaled_dot_product_attention

    def spy(*arrays, **options):
        result = attention(*arrays, **options)
        calls.append((arrays, options, result))
        return result

    monkeypatch.setattr(adapter, "scaled_dot_product_attention", spy)
    with torch.no_grad():
        found = values_of(run(model, "attention_core:reproducible", monkeypatch, **inputs))
    (query, key, value), options, result = calls[0]
    assert options["arithmetic"] == "reproducible"
    options = options | {"mask": torch.broadcast_to(options["mask"], (2, 1, 11, 11))[:1]}
    alone = attention(query[:1].contiguous(), key[:1].contiguous(), value[:1].contiguous(), **options)
    assert torch.equal(alone, result[:1])
    close(found, values_of(run(model, "attention_core", monkeypatch, **inputs)).detach(), atol=1e-4)


@pytest.mark.parametrize("hidden", [0, 3])
def test_sinks_of_each_token_are_a_key_without_a_value(hidden, adapter):
    """As an extra column of the scores, in the output, the weights and the gradients, and with fully masked rows."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3), (2, 4, 5, 1), (2, 4, 5, 7)
    arrays = [torch.randn(dims, generator=generator, dtype=torch.float64).requires_grad_() for dims in shapes]
    allowed = torch.rand((2, 1, 5, 7), generator=generator) < 0.6
    allowed[0, 0, :hidden] = False

    def expected(query, key, value, sinks, bias):
        key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
        scores = (1.5 * (0.3 * query @ key.mT / 1.5).tanh() + bias).masked_fill(~allowed, -torch.inf)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        return (weights @ value).transpose(1, 2), weights

    def found(query, key, value, sinks, bias):
        options = {"scaling": 0.3, "softcap": 1.5, "sinks": sinks, "position_bias": bias, "output_attentions": True}
        return adapter.attend(torch.nn.Module(), query, key, value, allowed, **options)

    (output, weights), (right, right_weights) = found(*arrays), expected(*arrays)
    close(output, right)
    close(weights, right_weights)
    gradients, right_gradients = (torch.autograd.grad(each.sin().sum(), arrays) for each in (output, right))
    for ours, theirs in zip(gradients, right_gradients, strict=True):
        close(ours, theirs)


def test_an_option_is_computed_or_refused_by_its_name(adapter):
    module, x = torch.nn.Module().eval(), torch.zeros((1, 2, 3, 4))
    for name in ("block_indices", "cache", "head_mask", "alibi", "cu_seq_lens_q", "key_padding_mask", "attention_bias"):
        with pytest.raises(ValueError):
            adapter.attend(module, x, x, x, None, **{name: torch.zeros(1)})
        for absent in (None, False):
            adapter.attend(module, x, x, x, None, **{name: absent})
    for name in adapter.WITHOUT_EFFECT:
        adapter.attend(module, x, x, x, None, **{name: torch.ones(1, dtype=torch.int64)})
    for sinks, options in (
        (torch.zeros(2), {}),
        (torch.zeros(1, 2, 3, 1), {"s_aux": torch.zeros(2)}),
        (torch.zeros(1, 2, 3, 1), {"arithmetic": "reproducible"}),
    ):
        with pytest.raises(ValueError):
            adapter.attend(module, x, x, x, None, sinks=sinks, **options)


def test_it_is_said_whose_attention_is_computed_here(adapter):
    transformers = importlib.import_module("transformers")
    for family, names in (
        ("Bart", ["encoder.layers.{}.self_attn", "decoder.layers.{}.self_attn", "decoder.layers.{}.encoder_attn"]),
        ("Llama", ["layers.{}.self_attn"]),
    ):
        model, inputs = model_of(family), inputs_of(family)
        model.set_attn_implementation("attention_core")
        functions = [transformers.AttentionInterface()[name] for name in adapter.NAMES]
        found = adapter.attention_modules(model, **inputs)
        assert sorted(found) == sorted(f"model.{name.format(index)}" for name in names for index in range(2))
        assert functions == [transformers.AttentionInterface()[name] for name in adapter.NAMES]
        model.set_attn_implementation("sdpa")
        assert adapter.attention_modules(model, **inputs) == []
    config = transformers.BloomConfig(vocab_size=61, hidden_size=24, n_layer=1, n_head=4)
    model = transformers.BloomModel._from_config(config, attn_implementation="attention_core").eval()
    with pytest.warns(UserWarning, match="^BloomModel computes attention itself: attention_core is not called$"):
        assert adapter.attention_modules(model, **inputs_of("Llama")) == []


@pytest.mark.parametrize("package", [None, SimpleNamespace(__version__="4.57.6")])
def test_register_says_what_to_install(package, adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", package)
    with pytest.raises(ImportError):
        adapter.register()
