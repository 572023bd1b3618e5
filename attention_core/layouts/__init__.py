"""Read and write the weights of other libraries' attention modules, as arrays of any library.

A layout is defined by the names and shapes of its arrays. Arguments give what arrays cannot tell, such as the number of
heads. Weights or settings without a counterpart raise a `LayoutError`; nothing is left out silently.
"""

from attention_core.layouts._bert import (
    BERT,
    BERT_EMBEDDINGS,
    BERT_LAYER,
    bert_arguments,
    bert_embeddings_arguments,
    bert_layer_arguments,
    from_bert,
    from_bert_embeddings,
    from_bert_layer,
    to_bert,
    to_bert_embeddings,
    to_bert_layer,
)
from attention_core.layouts._equinox import EQUINOX, equinox_arguments, from_equinox, to_equinox
from attention_core.layouts._heads import join_heads, separate_heads
from attention_core.layouts._kernels import (
    FLAX,
    KERAS,
    KERAS_GROUPED,
    flax_arguments,
    from_flax,
    from_keras,
    from_keras_grouped,
    keras_arguments,
    keras_grouped_arguments,
    to_flax,
    to_keras,
    to_keras_grouped,
)
from attention_core.layouts._layout import Layout, LayoutError
from attention_core.layouts._torch import (
    TORCH,
    TORCH_ENCODER_LAYER,
    from_torch,
    from_torch_encoder_layer,
    to_torch,
    to_torch_encoder_layer,
    torch_arguments,
    torch_encoder_arguments,
)

__all__ = [
    "LAYOUTS",
    "Layout",
    "LayoutError",
    "from_bert",
    "from_bert_embeddings",
    "from_bert_layer",
    "from_equinox",
    "from_flax",
    "from_keras",
    "from_keras_grouped",
    "from_torch",
    "from_torch_encoder_layer",
    "join_heads",
    "separate_heads",
    "to_bert",
    "to_bert_embeddings",
    "to_bert_layer",
    "to_equinox",
    "to_flax",
    "to_keras",
    "to_keras_grouped",
    "to_torch",
    "to_torch_encoder_layer",
]


LAYOUTS = {
    "torch": Layout(TORCH, from_torch, to_torch, torch_arguments),
    "torch-encoder-layer": Layout(
        TORCH_ENCODER_LAYER, from_torch_encoder_layer, to_torch_encoder_layer, torch_encoder_arguments
    ),
    "keras": Layout(KERAS, from_keras, to_keras, keras_arguments),
    "keras-grouped": Layout(KERAS_GROUPED, from_keras_grouped, to_keras_grouped, keras_grouped_arguments),
    "flax": Layout(FLAX, from_flax, to_flax, flax_arguments),
    "equinox": Layout(EQUINOX, from_equinox, to_equinox, equinox_arguments),
    "bert": Layout(BERT, from_bert, to_bert, bert_arguments),
    "bert-layer": Layout(BERT_LAYER, from_bert_layer, to_bert_layer, bert_layer_arguments),
    "bert-embeddings": Layout(BERT_EMBEDDINGS, from_bert_embeddings, to_bert_embeddings, bert_embeddings_arguments),
}
"""The layouts by name."""

for _name in __all__:
    if hasattr(vars()[_name], "__module__"):
        vars()[_name].__module__ = __name__  # by which pickles and documentation know it
