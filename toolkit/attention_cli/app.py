"""The subcommands of ``attention-core``: their options and help. Their work is imported only when it is asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from attention_cli.options import Count, Counts, Many, Natural, Positive, Seconds, Size, app, command
from attention_conformance.kernel.options import Options

__all__ = ["app"]


@command("List backends with versions, devices, dtypes and modes.", "attention_cli.backends:backends")
@dataclass(frozen=True)
class Backends:
    """List backends: versions, devices, floating-point types and modes."""


@command("Time attention on all frameworks.", "attention_cli.bench:bench")
@dataclass(frozen=True)
class Bench:
    """Time all implementations against those of the frameworks, after checking their results.

    The exit status is 1 if a result is wrong or a process failed, and 2 if an argument is not valid.

    Parameters
    ----------
    backend
        A framework to time; repeatable. By default all that are installed.
    candidate
        An implementation or a peer, by name, with * for any letters; repeatable. By default all.
    shape
        The batch, heads, length and head dimension, as in 4,12,512,64, or with KV heads and queries, as in
        4,12on4,1x512,64; repeatable.
    preset
        A set of shapes and masks: training, prefill, decode, accelerator; repeatable.
    mask
        A mask or a change of scores: full, causal, window, packed, padded, padded-causal, softcap, alibi, bias,
        sinks; repeatable.
    direction
        The passes to time: forward, or fwd+bwd; repeatable. By default both.
    dtype
        The floating-point type of all arrays.
    device
        The device: cpu, or the beginning of a name, such as cuda.
    rounds
        The number of samples of each candidate. By default 5 to 30, as --seconds allows.
    seconds
        The time for the samples of a candidate, where --rounds is not given.
    max_seconds
        Skip calls that would take more than these seconds.
    memory
        Measure peak memory as well, each candidate in a process of its own.
    verbose
        Print a table for every problem, too.
    """

    backend: Many = None
    candidate: Many = None
    shape: Many = None
    preset: Many = None
    mask: Many = None
    direction: Many = None
    dtype: str = "float32"
    device: str = "cpu"
    rounds: Count = None
    seconds: float = 2.0
    max_seconds: float = 60.0
    threads: Positive = 2
    memory: bool = True
    json: Path | None = None
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class Ways:
    """The ways of running backends that several commands take.

    Parameters
    ----------
    backend
        A backend to run; repeatable. By default all that are installed.
    device
        A device to run on, or its kind, such as cuda; repeatable. By default all.
    mode
        A mode to run in, such as eager or jit; repeatable. By default all.
    """

    backend: Many = None
    device: Many = None
    mode: Many = None
    json: Path | None = None
    jobs: Natural = os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Apart:
    """Options of what runs in a process of its own."""

    jobs: Annotated[int, typer.Option(min=0, max=1)] = 1
    json: Path | None = None


@command("Check any attention.", "attention_cli.check:check")
@dataclass(frozen=True)
class Check(Options, Apart):
    """Check any attention, as users call it; `conformance` checks this project's own, in all its backends and modes.

    The signature and small calls tell what the target expects, and that is printed. If it is wrong, an option corrects
    it. The exit status is 0 if all is right or accepted, and 1 if something is wrong or of another convention. It is 2
    if the command cannot be run as given, and 3 if a case crashed or took too long. It is 4 if nothing else is wrong,
    and a parameter of the target is unknown.

    Parameters
    ----------
    target
        The attention: module:callable, file.py:callable, or a preset such as torch.sdpa.
    timeout
        The seconds that a case may take.
    write_expected
        Write the failures to this file, which --expected reads.
    untrusted
        Compare results in another process, as generated kernels may cheat.
    strict
        End with status 1 also if few cases were computed.
    """

    target: Annotated[str, typer.Argument()]
    timeout: Seconds = 60.0
    write_expected: Path | None = None
    untrusted: bool = False
    strict: bool = False


@command("Find where two models differ.", "attention_cli.compare:compare")
@dataclass(frozen=True)
class Compare(Apart):
    """Run two models or layers on the same input, each in its framework, and say where they differ, and why.

    A model is a file of this project, a GGUF file, a folder of transformers, a .keras file, or file.py:name. With a
    framework in front, as in jax:FOLDER, the layers of this project run the same weights there.

    The exit status is 0 if all activations are within the bound, and 1 if not. It is 2 if models cannot be compared,
    and 3 if one crashed or took too long.

    Parameters
    ----------
    first
        The model that the other is compared with.
    second
        The other model.
    input
        A file of token_ids or x, key_mask and mask, as safetensors, npz or npy. By default they are drawn.
    bound
        The difference that is allowed besides that of rounding, in ulps of the largest number of a position.
    timeout
        The seconds that a step may take, such as a run of a model.
    verbose
        Print all activations, not only those around the first that differs.
    """

    first: Annotated[str, typer.Argument()]
    second: Annotated[str, typer.Argument()]
    input: Path | None = None
    bound: Size = 16.0
    timeout: Seconds = 300.0
    verbose: bool = False


@command("Convert weights from one library's layout to another's.", "attention_cli.convert:convert")
@dataclass(frozen=True)
class Convert:
    """Convert weights from the layout of one library to that of another, bit for bit.

    In the layout attention-core, the file has the settings. For any other layout, options give the settings that arrays
    do not show. The exit status is 0 if the target was written, 1 if the weights cannot be converted, and 2 if the
    command cannot be run as given.

    Parameters
    ----------
    source
        A file of safetensors; for causal-lm, a folder; for gguf, a GGUF file.
    target
        The file to write.
    from_
        The layout of the source: gguf, attention-core, torch, torch-encoder-layer, torch-decoder-layer,
        equinox, keras, keras-grouped, flax, bert, bert-layer, bert-embeddings, causal-lm.
    to
        The layout of the target: attention-core, torch, torch-encoder-layer, torch-decoder-layer, equinox,
        keras, keras-grouped, flax, bert, bert-layer, bert-embeddings, causal-lm.
    num_heads
        The number of query heads of the source.
    zero_attention
        The source was made with add_zero_attn=True.
    norm_first
        The source was made with norm_first=True.
    epsilon
        The epsilon of the source's normalizations.
    activation
        The activation of the source: relu or gelu.
    dropout
        The dropout rate of the source.
    padding_idx
        The padding_idx of RoBERTa's position embeddings; -1 for those of BERT.
    prefix
        The prefix of the source's array names that is removed.
    drop
        Leave out arrays whose names begin with this after the prefix; repeatable.
    force
        Replace the target if it exists.
    """

    source: Annotated[Path, typer.Argument()]
    target: Annotated[Path, typer.Argument()]
    from_: str
    to: str
    num_heads: Count = None
    zero_attention: bool = False
    norm_first: bool = False
    epsilon: float | None = None
    activation: str | None = None
    dropout: float | None = None
    padding_idx: int | None = None
    prefix: str = ""
    drop: list[str] | None = None
    force: bool = False


@command("Continue a text by a language model.", "attention_cli.generate:generate")
@dataclass(frozen=True)
class Generate:
    """Continue texts by a language model, on one backend. The folder of --model has a tokenizer.json.

    The command prints the text of one prompt as it comes, the speed, and the SHA-256 of all logits of each prompt. In
    reproducible arithmetic, all backends, modes and batches have the same hash. The exit status is 0 if the text is
    complete, and 2 if the command cannot be run as given.

    Parameters
    ----------
    prompts
        The texts to continue, as one batch.
    backend
        The backend to run. By default numpy.
    mode
        The mode of each step, such as eager, jit, graph or compiled.
    arithmetic
        The arithmetic: fast or reproducible.
    max_new_tokens
        The most tokens that are added to a text.
    cache_dtype
        The dtype of the KV cache, such as bfloat16. By default that of the weights.
    tokenizer
        A tokenizer.json to use instead of the model's.
    chat
        Write each prompt in ChatML, the format of instructed models.
    temperature
        The temperature of sampling; 0 takes the most probable token.
    top_k
        Sample from this number of the most probable tokens.
    top_p
        Sample from the most probable tokens that together have this probability, in (0, 1].
    seed
        The seed of sampling.
    """

    prompts: Annotated[list[str], typer.Argument()]
    model: Path | None = None
    backend: str | None = None
    mode: str = "eager"
    arithmetic: str = "fast"
    max_new_tokens: Positive = 64
    cache_dtype: str | None = None
    tokenizer: Path | None = None
    chat: bool = False
    temperature: Size = 0.0
    top_k: Count = None
    top_p: float | None = None
    seed: Natural = 0


@command("Look at weights.", "attention_cli.view:view")
@dataclass(frozen=True)
class View:
    """Show weights as one HTML file, which needs no network, or as text.

    The exit status is 0 if the view was made, and 2 if the command cannot be run as given.

    Parameters
    ----------
    files
        Weights, or query and key, as npz, npy or safetensors; a second file is compared.
    output
        The HTML file to write. By default text is printed.
    tokens
        A file of the tokens: a list in JSON, or one token in each line.
    image
        The image whose patches are the queries and keys, as PNG or JPEG.
    class_tokens
        The number of class or register tokens before the patches.
    query
        The query to show first: its number, or R,C on the image; repeatable.
    head
        A head to show; repeatable. By default all.
    sample
        The number of the sample in the batch.
    """

    files: Annotated[list[Path], typer.Argument()]
    output: Path | None = None
    tokens: Path | None = None
    image: Path | None = None
    class_tokens: Natural = 0
    query: Many = None
    head: list[int] | None = None
    sample: int = 0
    causal: bool = False


@command("Hash a call or a saved layer in every configuration.", "attention_cli.digest:digest")
@dataclass(frozen=True)
class Digest(Ways):
    """Hash the results of a call of attention, or of a saved layer, on given inputs, with SHA-256.

    A call takes query, key, value and, if they are there, mask and bias. A layer takes its own arguments, by name.
    Reproducible arithmetic computes them by an eager call on every backend, again in small blocks, and one sample of a
    batch at a time. --mode adds compiled calls, and --threads, which is repeatable, a process with so many threads.
    With --chain or --against, a language model has a hash for each layer and token instead, and the command prints the
    first that differs.

    The exit status is 0 if all bits are the same (and as expected), 1 if not, and 2 if the command cannot be run as
    given.

    Parameters
    ----------
    files
        Inputs as safetensors, and at most one saved layer; a language model with --chain or --against.
    mode
        A mode to run in, such as eager or jit; repeatable. By default eager.
    scale
        The scale of a call without a layer.
    softcap
        The softcap of a call without a layer.
    sha256
        The expected hash, of 64 hex digits.
    chain
        Write a hash for each layer and token of a language model to this file.
    against
        Compare the hashes of layers and tokens with this file, which --chain wrote on another machine.
    arithmetic
        The arithmetic of the hashes of layers and tokens: reproducible or fast.
    """

    files: Annotated[list[Path], typer.Argument()]
    threads: Counts = None
    causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    sha256: str | None = None
    chain: Path | None = None
    against: Path | None = None
    arithmetic: str = "reproducible"


@command("Check this project on your machine.", "attention_cli.conformance:conformance")
@dataclass(frozen=True)
class Conformance(Ways):
    """Check this project's own attention, in all its backends and modes; `check` checks any other.

    Each result of a catalogue of cases is compared with an oracle of higher precision. With --identical, run another
    catalogue in reproducible arithmetic, in every mode of every backend, and compare the SHA-256 of each result with
    the published one. Eager calls run again in small blocks, one sample of a batch at a time, and with one thread.
    --model adds the case model, of an encoder of BERT's type or a language model of Llama's.

    The exit status is 0 if all results keep their bounds, 1 if not (or if nothing could be run), and 2 if the command
    cannot be run as given.

    Parameters
    ----------
    dtype
        A floating-point type to run; repeatable. By default all.
    implementation
        The implementation: dense, blockwise or fused; repeatable. By default all three, and fewer where compiled.
    case
        A case by name, in which * and ? match any letters; repeatable. By default all.
    list_
        List the cases with a sentence each, and run none.
    quick
        Run only eager calls in float32; with --identical, only one eager call of each case.
    identical
        Compare the bits of reproducible arithmetic with published hashes.
    long
        Run the language model in all modes, and compare the bits of 8 prompts.
    """

    dtype: Many = None
    implementation: Many = None
    case: Many = None
    model: Path | None = None
    list_: bool = False
    quick: bool = False
    identical: bool = False
    long: bool = False
