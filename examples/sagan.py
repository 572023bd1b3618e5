"""Train attention over feature maps on a photograph of scikit-learn, so that its weights can be looked at.

A picture loses its colours, except within random patches. One SAGAN block stands between a layer that sees 7 × 7 pixels
and a linear one. A place finds its colour at places that look like it, wherever these are. Training needs PyTorch;
every library loads the file that is written. `docs/plot_sagan.py` draws the weights::

    python examples/sagan.py sagan.safetensors
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_sample_image

from attention_core.parameters import Linear, SaganAttention

SCALE, SEES, STRIDE, CHANNELS, STEPS, BATCH, SIDE = 2, 7, 2, 64, 400, 4, 80


class Picture(NamedTuple):
    """Brightness (height, width) and two differences of colour (height, width, 2)."""

    grey: np.ndarray
    colour: np.ndarray


def photograph() -> np.ndarray:
    """The flower of scikit-learn at half its size, (212, 320, 3) in [0, 1]."""
    pixels = load_sample_image("flower.jpg")[:424] / np.float32(255)
    return pixels.reshape(424 // SCALE, SCALE, 640 // SCALE, SCALE, 3).mean((1, 3), dtype=np.float32)


def split(pixels: np.ndarray) -> Picture:
    """Brightness, and red and blue less green."""
    grey = pixels.mean(-1) - np.float32(0.5)
    return Picture(grey, np.stack([pixels[..., 0] - pixels[..., 1], pixels[..., 2] - pixels[..., 1]], axis=-1))


def seen(picture: Picture, known: np.ndarray) -> np.ndarray:
    """All that the network sees of each place, (height / 2, width / 2, 52): brightness around it, and known colour.

    ``known`` says of which places the colour is known.
    """
    pad = SEES // 2
    around = np.lib.stride_tricks.sliding_window_view(np.pad(picture.grey, pad, mode="edge"), (SEES, SEES))
    around = around[::STRIDE, ::STRIDE].reshape(*known.shape, -1)
    colour = np.where(known[..., None], places(picture.colour), 0)
    return np.concatenate([around, colour, known[..., None]], axis=-1).astype(np.float32)


def places(colour: np.ndarray) -> np.ndarray:
    """The mean of each 2 × 2 pixels."""
    height, width = (length // STRIDE for length in colour.shape[:2])
    return colour.reshape(height, STRIDE, width, STRIDE, -1).mean((1, 3))


def patches(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Which places keep their colour: half of all patches of 8 × 8."""
    kept = rng.random([-(-length // 8) for length in shape]) < 0.5
    return np.kron(kept, np.ones((8, 8), bool))[: shape[0], : shape[1]].astype(bool)


def train(steps: int = STEPS) -> tuple[dict[str, Any], list[float]]:
    """Parameters of the first layer and of the block, and the loss of each step."""
    import torch

    import attention_torch

    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that wait for others slow such small products down
    rng, picture = np.random.default_rng(0), split(photograph())
    stem = torch.nn.Linear(SEES * SEES + 3, CHANNELS)
    block = attention_torch.SaganAttention(CHANNELS, data_format="channels_last", spectral_norm=False, seed=1)
    torch.nn.init.constant_(block.sigma, 1.0)  # from 0, as published, it takes longer
    head = torch.nn.Linear(CHANNELS, 2)
    parameters = [each for module in (stem, block, head) for each in module.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    losses = []
    for _ in range(steps):
        inputs, wanted, hidden = [], [], []
        for _ in range(BATCH):
            top, left = (2 * int(rng.integers((length - SIDE) // 2)) for length in picture.grey.shape)
            crop = Picture(*(each[top : top + SIDE, left : left + SIDE] for each in picture))
            known = patches(rng, (SIDE // STRIDE, SIDE // STRIDE))
            inputs.append(seen(crop, known))
            wanted.append(places(crop.colour))
            hidden.append(~known)
        found = head(block(torch.relu(stem(torch.from_numpy(np.stack(inputs))))))
        errors = (found - torch.from_numpy(np.stack(wanted))).abs().mean(-1)
        loss = errors[torch.from_numpy(np.stack(hidden))].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    kernels = [Linear(getattr(block, name).weight.detach().numpy()) for name in ("theta", "phi", "g", "output")]
    trained = SaganAttention(*kernels, sigma=block.sigma.detach().numpy())
    return {"stem": Linear(stem.weight.detach().numpy().T.copy(), stem.bias.detach().numpy()), "block": trained}, losses


def scene() -> np.ndarray:
    """The whole photograph with its colours, as the network sees it: (1, 106, 160, 52)."""
    picture = split(photograph())
    return seen(picture, np.ones([length // STRIDE for length in picture.grey.shape], bool))[None]


def maps(parameters: dict[str, Any], inputs: Any, arithmetic: str = "fast") -> Any:
    """The recorded attention of the trained block, on the library of the parameters and inputs."""
    from attention_core.backend import array_namespace
    from attention_core.functions import linear, sagan_attention
    from attention_core.weights import record_attention

    xp = array_namespace(inputs)
    found = linear(parameters["stem"], inputs, arithmetic=arithmetic)
    found = xp.where(xp.greater(found, 0.0), found, 0.0)
    with record_attention() as records:
        sagan_attention(parameters["block"], found, arithmetic=arithmetic)
    return records[0]


def main() -> None:
    """Train, and save the first layer and the block in one file."""
    from attention_files.safetensors import save_tree

    start = time.perf_counter()
    parameters, losses = train()
    save_tree(sys.argv[1], parameters)
    seconds = time.perf_counter() - start
    print(f"loss {np.mean(losses[:20]):.4f} -> {np.mean(losses[-20:]):.4f} in {seconds:.0f} s")


if __name__ == "__main__":
    main()
