"""Programs that were exported before operations had names: they hold addresses of functions in former files."""

from __future__ import annotations

from typing import Any

__all__ = ["decode_former"]

PLAN = "attention_core._plan:Plan"
OPERATIONS = {
    "attention_core._blockwise:forward": "blockwise",
    "attention_core._exact_attention:forward": "reproducible",
    "attention_core._exact_scores:_forward": "reproducible.scores",
    "attention_core._exact_partial:_extent_forward": "reproducible.extent",
    "attention_core._exact_partial:_sums_forward": "reproducible.sums",
    "attention_core._exact_partial:_closing_forward": "reproducible.complete",
    "attention_core._exact_layers:_affine_forward": "reproducible.affine",
    "attention_core._exact_layers:_normalize_forward": "reproducible.layer_norm",
    "attention_core._exact_layers:_normalize_rms_forward": "reproducible.rms_norm",
    "attention_core._exact_layers:_rotate_forward": "reproducible.rotary",
    "attention_core._exact_layers:_gelu_forward": "reproducible.gelu",
    "attention_core._exact_layers:_add_forward": "reproducible.add",
    "attention_core._exact_layers:_copies_forward": "reproducible.fan_out",
    "attention_core._exact_layers:_blend_forward": "reproducible.blend",
    "attention_core._exact_layers:_scaled_forward": "reproducible.dropout",
    "attention_core._exact_layers:_lookup_forward": "reproducible.lookup",
    "attention_core._exact_layers:_pooled_forward": "reproducible.max_pool",
    "attention_core._exact_layers:_unit_forward": "reproducible.unit",
    "attention_core._exact_layers:_divide_forward": "reproducible.divide",
}
CLASSES = {
    "builtins:tuple": "tuple",
    "attention_core.masks:Slot": "Leaf",
    "attention_core.scores:_Alibi": "alibi",
    "attention_core.scores:_RelativeBias": "relative_bias",
}
FIELDS = {  # in the order in which they stood
    "Plan": ("mask", "score_mod", "softcap", "dropout_rate", "seed", "starts", "present", "num_arrays", "may_mask",
             "all_finite", "block_sizes", "max_backward_keys", "per_head", "max_keys_per_run", "exp_without_max"),
    "Constants": ("number",),
    "Rotation": ("base", "width", "interleaved"),
    "Closing": ("factor", "counts_nonfinite"),
    "Leaf": ("place", "axes"),
}  # fmt: skip


def decode_former(encoded: tuple[Any, ...]) -> tuple[Any, Any]:
    """An operation and a plan of the former format in that of today."""
    forward, _, _, _, kind, *fields = encoded
    if kind == PLAN:
        *fields, exact, _ = fields
        scale, num_slices = exact[1:] if exact else (1.0, 0)
        name, named = _named_tuple(kind, fields)
        return f"@{OPERATIONS[forward]}", (name, {**named, "num_slices": num_slices, "score_scale": scale})
    return f"@{OPERATIONS[forward]}", _named_tuple(kind, fields)


def _named_tuple(kind: str, fields: Any) -> tuple[str, dict[str, Any]]:
    name = CLASSES.get(kind, kind.partition(":")[2])
    return f"@{name}", dict(zip(FIELDS[name], map(_part, fields), strict=True))


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return f"@{CLASSES.get(part, part.partition(':')[2])}"
    if not isinstance(part, tuple):
        return part
    kind, *fields = part
    return [_part(each) for each in fields] if kind == "builtins:tuple" else _named_tuple(kind, fields)
