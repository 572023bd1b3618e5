"""Modules of other libraries as layers here and back: the same bits, and the same outputs in float64.

``AGREEMENT`` says how closely, relative to the largest output: 1e-14, but where the other library computes in float32.
"""

import importlib

import pytest
from backend_helpers import imported
from conversion_helpers import agree, perturbed, same, same_layer, state, there_and_back
from pairwise import covering

from attention_models.layouts import LAYOUTS, LayoutError

# The libraries announce what they deprecate in one another; none of it is about these numbers.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


torch, of_torch = imported("torch"), imported("attention_models.torch.conversion")
bert = imported("transformers.models.bert.modeling_bert")

OPTIONS = covering((None, 10), (None, 14), *[(True, False)] * 3)


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("kdim", "vdim", "bias", "add_zero_attn", "batch_first"), OPTIONS)
def test_multi_head_attention_of_torch(torch, of_torch, rng, kdim, vdim, bias, add_zero_attn, batch_first):
    options = {"kdim": kdim, "vdim": vdim, "bias": bias, "add_zero_attn": add_zero_attn}
    theirs = torch.nn.MultiheadAttention(12, 3, dropout=0.25, **options, batch_first=batch_first, dtype=torch.float64)
    perturbed(torch, theirs)
    ours, back = there_and_back(of_torch, theirs, state)
    assert (ours.training, ours.definition.dropout) == (False, 0.25)
    assert back.batch_first
    shapes = ((2, 5, 12), (2, 7, kdim or 12), (2, 7, vdim or 12))
    inputs = [torch.from_numpy(rng.standard_normal(shape)) for shape in shapes]
    for masks, our_masks in every_mask(torch, rng):
        found = ours(*inputs, **our_masks).detach()
        ordered = inputs if batch_first else [x.transpose(0, 1) for x in inputs]
        for weights in (True, False):
            expected = theirs(*ordered, **masks, need_weights=weights)[0].detach()
            agree(found, expected if batch_first else expected.transpose(0, 1), "torch.nn.MultiheadAttention")
        agree(found, back(*inputs, **masks)[0].detach(), "torch.nn.MultiheadAttention")


def every_mask(torch, rng):
    """Masks as PyTorch has them, True = ignore, and as they are here; no query is without a key."""
    ignored = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    pairs = torch.from_numpy(rng.random((5, 7)) < 0.4)
    pairs[:, 0] = False
    heads = torch.from_numpy(rng.random((6, 5, 7)) < 0.4)
    heads[..., 0] = False
    added = torch.from_numpy(rng.standard_normal((5, 7)))
    yield {}, {}
    yield {"key_padding_mask": ignored}, {"key_mask": ~ignored}
    yield {"attn_mask": pairs}, {"mask": ~pairs}
    yield {"attn_mask": heads, "key_padding_mask": ignored}, {"mask": ~heads.reshape(2, 3, 5, 7), "key_mask": ~ignored}
    yield {"attn_mask": added}, {"bias": added}


@pytest.mark.needs("torch")
def test_weights_of_any_dtype_keep_their_bits_in_torch(torch, of_torch):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        theirs = torch.nn.MultiheadAttention(8, 2, dtype=dtype).train()
        ours = of_torch.from_module(theirs)
        back = of_torch.to_module(ours, torch.nn.MultiheadAttention)
        assert ours.training
        assert back.training
        for name, tensor in theirs.state_dict().items():
            assert back.state_dict()[name].dtype == dtype
            assert torch.equal(back.state_dict()[name], tensor)
            assert back.get_parameter(name).requires_grad


@pytest.mark.needs("torch")
def test_what_is_converted_shares_no_memory(torch, of_torch):
    theirs = torch.nn.MultiheadAttention(8, 2)
    ours = of_torch.from_module(theirs)
    back = of_torch.to_module(ours, torch.nn.MultiheadAttention)
    kept = [parameter.detach().clone() for parameter in theirs.parameters()]
    with torch.no_grad():
        for parameter in (*ours.parameters(), *back.parameters()):
            parameter.fill_(7)
    assert all(map(torch.equal, theirs.parameters(), kept))


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("norm_first", "activation", "bias"), [(True, "gelu", True), (False, "relu", True), (False, "gelu", False)]
)
def test_encoder_layer_of_torch(torch, of_torch, rng, norm_first, activation, bias):
    options = {"activation": activation, "layer_norm_eps": 1e-6, "norm_first": norm_first, "bias": bias}
    theirs = torch.nn.TransformerEncoderLayer(12, 3, 20, 0.0, batch_first=True, dtype=torch.float64, **options)
    perturbed(torch, theirs)
    ours, back = there_and_back(of_torch, theirs, state)
    x, ignored = (
        torch.from_numpy(rng.standard_normal((2, 5, 12))),
        torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
    )
    pairs = torch.eye(5, dtype=torch.bool).roll(1, 0)
    for masks, our_masks in (
        ({}, {}),
        ({"src_mask": pairs}, {"mask": ~pairs}),
        ({"src_key_padding_mask": ignored}, {"key_mask": ~ignored}),
    ):
        for module in (theirs, back):  # with a gradient, as without one PyTorch fuses, and rounds otherwise
            agree(ours(x, **our_masks).detach(), module(x, **masks).detach(), "torch.nn.TransformerEncoderLayer")
    causal = ours.with_settings(is_causal=True)
    expected = theirs(x, src_mask=~torch.tril(torch.ones(5, 5, dtype=torch.bool)), is_causal=True)
    agree(causal(x).detach(), expected.detach(), "torch.nn.TransformerEncoderLayer")
    with pytest.raises(LayoutError):
        of_torch.to_module(causal, torch.nn.TransformerEncoderLayer)


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("norm_first", "activation", "bias"), [(True, "gelu", True), (False, "relu", True), (True, "relu", False)]
)
def test_decoder_layer_of_torch(torch, of_torch, rng, norm_first, activation, bias):
    options = {"activation": activation, "layer_norm_eps": 1e-6, "norm_first": norm_first, "bias": bias}
    theirs = torch.nn.TransformerDecoderLayer(12, 3, 20, 0.0, batch_first=True, dtype=torch.float64, **options)
    perturbed(torch, theirs)
    ours, back = there_and_back(of_torch, theirs, state)
    x, memory = (torch.from_numpy(rng.standard_normal((2, length, 12))) for length in (5, 7))
    ignored = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    pairs = torch.from_numpy(rng.random((5, 7)) < 0.4)
    pairs[:, 0] = False
    causal = {"tgt_mask": ~torch.tril(torch.ones(5, 5, dtype=torch.bool)), "tgt_is_causal": True}
    for masks, our_masks in (
        ({}, {}),
        ({"memory_mask": pairs}, {"memory_mask": ~pairs}),
        ({"memory_key_padding_mask": ignored}, {"memory_key_mask": ~ignored}),
        ({"tgt_key_padding_mask": ignored[:, :5]}, {"key_mask": ~ignored[:, :5]}),
    ):
        expected = theirs(x, memory, **causal, **masks).detach()
        agree(ours(x, memory=memory, **our_masks).detach(), expected, "torch.nn.TransformerDecoderLayer")
        agree(back(x, memory, **causal, **masks).detach(), expected, "torch.nn.TransformerDecoderLayer")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("kind", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_dropout_inside_of_a_feed_forward_is_left_out_of_evaluation_with_a_warning(torch, of_torch, rng, kind):
    theirs = getattr(torch.nn, kind)(12, 3, 20, batch_first=True, dtype=torch.float64)
    with pytest.raises(LayoutError):
        of_torch.from_module(theirs)
    theirs.eval()
    with pytest.warns(UserWarning, match=f"left out: dropout inside the feed-forward of torch.nn.{kind}, 0.1, which"):
        ours = of_torch.from_module(theirs)
    assert (ours.training, ours.definition.dropout) == (False, 0.1)
    x = torch.from_numpy(rng.standard_normal((2, 5, 12)))
    memory = {} if "En" in kind else {"memory": x}
    masks = {} if "En" in kind else {"tgt_mask": ~torch.tril(torch.ones(5, 5, dtype=torch.bool))}
    agree(ours(x, **memory).detach(), theirs(x, **memory, **masks).detach(), f"torch.nn.{kind}")
    theirs.dropout.p = 0.0
    assert of_torch.from_module(theirs.train()).definition.dropout == 0.1
    theirs.dropout1.p = 0.2
    with pytest.raises(LayoutError):
        of_torch.from_module(theirs)


@pytest.mark.needs("torch")
def test_what_modules_of_torch_have_and_layers_have_not_is_named(torch, of_torch):
    encoder = torch.nn.TransformerEncoderLayer
    for module in (
        encoder(8, 2, dropout=0.0, activation=torch.nn.functional.silu),
        encoder(8, 2, dropout=0.0, activation=torch.nn.GELU("tanh")),
        torch.nn.MultiheadAttention(8, 2, add_bias_kv=True),
    ):
        with pytest.raises(LayoutError):
            of_torch.from_module(module)

    class Derived(torch.nn.MultiheadAttention):
        pass

    for module in (Derived(8, 2), torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError):
            of_torch.from_module(module)
        with pytest.raises(TypeError):
            of_torch.to_module(of_torch.from_module(torch.nn.MultiheadAttention(8, 2)), type(module))


SIZES = ("vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_size", "max_position_embeddings")  # fmt: skip


@pytest.mark.needs("torch")
@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre", ""])
def test_what_a_call_of_a_module_does_and_its_class_does_not_is_named(torch, of_torch, hook):
    theirs = torch.nn.MultiheadAttention(8, 2)
    if hook:
        getattr(theirs.out_proj, f"register_{hook}_hook")(print)
    else:
        theirs.out_proj.forward = print
    with pytest.raises(LayoutError):
        of_torch.from_module(theirs)


@pytest.mark.needs("torch", "transformers")
def test_a_model_is_told_what_reads_it_or_its_parts(bert, of_torch):
    transformers = importlib.import_module("transformers")
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    with pytest.raises(TypeError):
        of_torch.from_module(llama)
    classifier = transformers.BertForSequenceClassification(config(bert))
    with pytest.raises(TypeError):
        of_torch.from_module(classifier)


def config(bert, **more):
    sizes = {"vocab_size": 31, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
    sizes["hidden_size"] = more.pop("hidden_size", 12)
    return bert.BertConfig(**sizes, max_position_embeddings=9, attn_implementation="eager", **more)


def encoded(layers, ids, key_mask=None, **options):
    """The output of a whole BERT."""
    x = layers[0](ids, **options)
    for layer in layers[1:]:
        x = layer(x, key_mask=key_mask)
    return x


@pytest.mark.needs("torch", "transformers")
def test_bert(torch, of_torch, bert, rng):
    theirs = perturbed(torch, bert.BertModel(config(bert), add_pooling_layer=False).double())
    embeddings, *encoder = ours = of_torch.from_module(theirs)
    assert embeddings.definition.epsilon == encoder[0].definition.epsilon == 1e-12
    back = of_torch.to_module(ours, bert.BertModel)
    same(state(back), state(theirs))
    for layer, again in zip(ours, of_torch.from_module(back), strict=True):
        same_layer(layer, again)
    tokens, segments = (torch.from_numpy(rng.integers(0, most, (2, 7))) for most in (31, 2))
    attended = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    x = encoded(ours, tokens, segment_ids=segments, key_mask=attended.bool())
    for module in (theirs, back):
        expected = module(input_ids=tokens, token_type_ids=segments, attention_mask=attended).last_hidden_state
        agree(x.detach(), expected.detach(), "transformers BertLayer, BertEmbeddings, BertModel")


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize(("family", "segments"), [("Roberta", 1), ("Roberta", 2), ("XLMRoberta", 1), ("Camembert", 1)])
def test_relatives_of_bert_count_positions_from_behind_padding(family, segments, torch, of_torch, bert, rng):
    transformers = importlib.import_module("transformers")
    sizes = {name: getattr(config(bert), name) for name in SIZES}
    settings = getattr(transformers, f"{family}Config")(**sizes, type_vocab_size=segments, pad_token_id=1)
    theirs = getattr(transformers, f"{family}Model")(settings).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(3)
    kind = type(theirs)
    with pytest.warns(UserWarning, match=f"left out of {family}Model: pooler"):
        ours = of_torch.from_module(theirs)
    ids = torch.from_numpy(rng.integers(2, 31, (2, 5)))
    ids[0, :2] = 2
    expected, x = theirs(ids).last_hidden_state, encoded(ours, ids)
    agree(x.detach(), expected.detach(), "transformers BertLayer, BertEmbeddings, BertModel")
    ids[0, :2] = 1  # padding on the left, where positions count tokens alone
    kept = ids != 1
    x = encoded(ours, ids, position_ids=kept.cumsum(-1).clamp(min=1) - 1, key_mask=kept)[kept]
    wanted = theirs(ids, attention_mask=kept.long()).last_hidden_state[kept]
    agree(x.detach(), wanted.detach(), "transformers BertLayer, BertEmbeddings, BertModel")
    ids[0, :2] = 2
    arrays = {f"roberta.{name}": each for name, each in state(theirs).items() if "pooler" not in name}
    definitions, _ = LAYOUTS["bert"].read(arrays, num_heads=3, epsilon=settings.layer_norm_eps, dropout=0.1)
    assert list(definitions) == [layer.definition for layer in ours]
    again = of_torch.to_module(ours, bert.BertModel)(ids).last_hidden_state
    agree(again.detach(), expected.detach(), "transformers BertLayer, BertEmbeddings, BertModel")
    with pytest.raises(TypeError):
        of_torch.to_module(ours, kind)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("trained", [False, True])
def test_what_is_frozen_stays_so(trained, torch, of_torch):
    theirs = torch.nn.MultiheadAttention(8, 2).requires_grad_(trained)
    assert all(each.requires_grad is trained for each in of_torch.from_module(theirs).parameters())


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize("width", [3, 4, 8, 32, 64])
def test_parts_of_bert(width, torch, of_torch, bert, rng):
    """Their scale is rounded in another way than ours for most widths of heads."""
    x = torch.from_numpy(rng.standard_normal((2, 5, 3 * width)))
    sizes = config(bert, layer_norm_eps=1e-7, hidden_size=3 * width)
    theirs = perturbed(torch, bert.BertLayer(sizes).double())
    ours, back = there_and_back(of_torch, theirs, state)
    assert (ours.definition.epsilon, ours.definition.dropout) == (1e-7, 0.1)
    for module in (theirs, back):
        found = module(x)
        found = found[0] if isinstance(found, tuple) else found
        agree(ours(x).detach(), found.detach(), "transformers BertLayer, BertEmbeddings, BertModel")
    theirs = perturbed(torch, bert.BertEmbeddings(config(bert)).double())
    back = of_torch.to_module(of_torch.from_module(theirs), bert.BertEmbeddings)
    same(state(back), state(theirs))


@pytest.mark.needs("torch", "transformers")
def test_what_berts_have_and_layers_have_not_is_named(torch, of_torch, bert):
    for settings in ({"hidden_act": "relu"}, {"is_decoder": True}, {"hidden_dropout_prob": 0.3}):
        with pytest.raises(LayoutError):
            of_torch.from_module(bert.BertLayer(config(bert, **settings)))
    layer = of_torch.from_module(bert.BertLayer(config(bert)))
    with pytest.raises(TypeError):
        of_torch.to_module([layer, layer], bert.BertLayer)
