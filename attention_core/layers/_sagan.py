"""Attention over feature maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import parameters as trees
from .._arrays import Array, Namespace
from .._functions.sagan import sagan_attention, spectral_norm
from ._layer import Initial, Layer, linear_spec


class SpectralVectors(NamedTuple):
    """Estimates of the first right singular vectors of the kernels of `SaganAttention`, each of shape (out,)."""

    theta: Array
    phi: Array
    g: Array
    output: Array | None = None


@dataclass(frozen=True)
class SaganAttention(Layer):
    """Self-attention over feature maps, as in SAGAN.

    Parameters
    ----------
    channels : int
        C.
    head_channels : int, optional
        Of theta and phi; by default C / 8, rounded down, but at least 1.
    value_channels : int, optional
        Of g; by default C / 2, rounded down (the authors' code), but at least 1; without an output convolution C.
    output : bool
        Whether a convolution leads back to C channels.
    output_channels : int, optional
        Nothing but C: the result is added to the input.
    bias : bool
        Of the convolutions.
    pool : bool
        Whether to pool phi and g, 2 × 2; an odd last row or column is then no key.
    spectral_norm : bool
        Whether to divide the kernels by their largest singular values, with `attention_core.functions.spectral_norm`.
        The vectors of its power iteration are the state of the layer.
    data_format : {"channels_last", "channels_first"}
    arithmetic : {"fast", "reproducible"}

    Raises
    ------
    TypeError, ValueError
        When a setting is not valid, or the result would not have C channels.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> layer = SaganAttention(16)
    >>> start, state = layer.init(0, xp=xp), layer.init_state(0, xp=xp)
    >>> x = xp.ones((1, 4, 4, 16), dtype=xp.float32)
    >>> bool(xp.all(layer(start, x, state=state) == x))  # sigma starts at 0
    True
    """

    channels: int
    head_channels: int | None = None
    value_channels: int | None = None
    output: bool = True
    output_channels: int | None = None
    bias: bool = False
    pool: bool = True
    spectral_norm: bool = True
    data_format: str = "channels_last"
    arithmetic: str = "fast"

    def __post_init__(self) -> None:
        super().__post_init__()
        last = "output_channels" if self.output else "value_channels"
        width = getattr(self, last)
        if width not in (None, self.channels):
            raise ValueError(f"expected {last} {self.channels}, as the result is added to the input; got {width}")
        if not self.output and self.output_channels is not None:
            raise ValueError(f"expected no output_channels without an output; got {self.output_channels}")

    @property
    def _widths(self) -> tuple[int, int]:
        head = max(1, self.channels // 8) if self.head_channels is None else self.head_channels
        default = max(1, self.channels // 2) if self.output else self.channels
        return head, default if self.value_channels is None else self.value_channels

    @property
    def parameters(self) -> trees.SaganAttention:
        """Specs of the convolutions, and of sigma, which starts at 0."""
        head, value = self._widths
        theta, phi, g = (linear_spec(self.channels, width, self.bias) for width in (head, head, value))
        output = linear_spec(value, self.channels, self.bias) if self.output else None
        return trees.SaganAttention(theta, phi, g, output, Initial((1,), "zeros"))

    @property
    def state(self) -> SpectralVectors | tuple[()]:
        """Specs of one vector for each kernel, with spectral normalization."""
        if not self.spectral_norm:
            return ()
        kernels = (None if kernel is None else kernel.weight.dims for kernel in self.parameters[:4])
        return SpectralVectors(*(None if dims is None else Initial(dims[1:], "normal") for dims in kernels))

    def __call__(
        self,
        parameters: trees.SaganAttention,
        x: Array,
        /,
        *,
        state: Any = (),
        return_weights: bool = False,
        xp: Namespace | None = None,
    ) -> Any:
        """Let every position attend to all positions of its map, as `attention_core.functions.sagan_attention` does.

        Parameters
        ----------
        parameters : attention_core.parameters.SaganAttention
        x : Array, shape (..., height, width, C)
            Or (..., C, height, width) with ``channels_first``.
        state : SpectralVectors
            Needed with spectral normalization.
        return_weights : bool
        xp : array namespace, optional

        Returns
        -------
        Array
            Of the shape of ``x``, or `Attention` with ``return_weights``.
        """
        if self.spectral_norm:
            parameters = self._normalized(parameters, state, xp)[0]
        settings: dict[str, Any] = {name: getattr(self, name) for name in ("pool", "data_format", "arithmetic")}
        return sagan_attention(parameters, x, return_weights=return_weights, xp=xp, **settings)

    def updated_state(self, parameters: trees.SaganAttention, state: Any, /, *, xp: Namespace | None = None) -> Any:
        """Compute the vectors after the step of power iteration that a call with these parameters takes."""
        return self._normalized(parameters, state, xp)[1] if self.spectral_norm else state

    def _normalized(self, parameters: trees.SaganAttention, state: Any, xp: Namespace | None) -> Any:
        if not isinstance(state, SpectralVectors):
            raise TypeError(f"expected state as SpectralVectors(theta, phi, g, output); got {type(state).__name__}")
        kernels, vectors = {}, {}
        for name, u in zip(state._fields, state, strict=True):
            kernel = getattr(parameters, name)
            if kernel is not None:
                weight, vectors[name] = spectral_norm(kernel.weight, u, arithmetic=self.arithmetic, xp=xp)
                kernels[name] = kernel._replace(weight=weight)
        return parameters._replace(**kernels), state._replace(**vectors)
