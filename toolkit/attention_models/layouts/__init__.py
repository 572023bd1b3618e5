"""Read and write the weights of other libraries' attention modules, as arrays of any library.

A layout is defined by the names and shapes of its arrays. Arguments give what arrays cannot tell, such as the number of
heads. Weights or settings without a counterpart raise a `LayoutError`; nothing is left out silently. Arrays that are
missing, unknown or of another shape raise one, too. Other settings that are not valid, and parameters that do not fit
their definition, raise `TypeError` or `ValueError`. Functions that read return a definition of `attention_core.layers`
and its parameters.
"""

from attention_core._keywords import publish
from attention_models.layouts import _bert, _decoder, _kernels, _torch
from attention_models.layouts._bert import (
    ENCODERS,
    encoder_from_config,
    from_bert,
    from_bert_embeddings,
    from_bert_layer,
    from_encoder,
    to_bert,
    to_bert_embeddings,
    to_bert_layer,
)
from attention_models.layouts._decoder import check_causal_lm, from_causal_lm, to_causal_lm
from attention_models.layouts._decoder_config import decoder_from_config
from attention_models.layouts._kernels import (
    from_flax,
    from_keras,
    from_keras_grouped,
    to_flax,
    to_keras,
    to_keras_grouped,
)
from attention_models.layouts._layout import Layout, LayoutError
from attention_models.layouts._rotary import rotary_divisors
from attention_models.layouts._torch import (
    from_equinox,
    from_torch,
    from_torch_decoder_layer,
    from_torch_encoder_layer,
    to_equinox,
    to_torch,
    to_torch_decoder_layer,
    to_torch_encoder_layer,
)

__all__ = [
    "ENCODERS",
    "LAYOUTS",
    "Layout",
    "LayoutError",
    "check_causal_lm",
    "decoder_from_config",
    "encoder_from_config",
    "from_bert",
    "from_bert_embeddings",
    "from_bert_layer",
    "from_causal_lm",
    "from_encoder",
    "from_equinox",
    "from_flax",
    "from_keras",
    "from_keras_grouped",
    "from_torch",
    "from_torch_decoder_layer",
    "from_torch_encoder_layer",
    "rotary_divisors",
    "to_bert",
    "to_bert_embeddings",
    "to_bert_layer",
    "to_causal_lm",
    "to_equinox",
    "to_flax",
    "to_keras",
    "to_keras_grouped",
    "to_torch",
    "to_torch_decoder_layer",
    "to_torch_encoder_layer",
]


LAYOUTS: dict[str, Layout] = {**_torch.LAYOUTS, **_kernels.LAYOUTS, **_bert.LAYOUTS, **_decoder.LAYOUTS}
"""The layouts by name."""

publish(vars(), __all__)
