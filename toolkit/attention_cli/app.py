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
        A framework; repeatable. By default all.
    candidate
        Candidates by name, * allowed; repeatable.
    shape
        Batch, heads, length, head dimension, as in 4,12,512,64, or with KV heads and queries: 4,12on4,1x512,64;
        repeatable.
    preset
        training, prefill, decode, accelerator: shapes and masks; repeatable.
    mask
        full, causal, window, packed, padded, padded-causal, softcap, alibi, bias, sinks; repeatable.
    direction
        forward, or fwd+bwd; repeatable. By default each of them.
    dtype
        A floating-point type.
    device
        cpu, or the beginning of device names, such as cuda.
    rounds
        Rounds of samples. By default 5 to 30.
    seconds
        Time for the samples of a candidate, by default.
    max_seconds
        Skip calls that would take more than these seconds.
    memory
        Measure peak memory as well, each candidate in a process.
    verbose
        A table for every single problem, too.
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
        A backend; repeatable. By default all that are installed.
    device
        A device, or its kind, as cuda; repeatable. By default all.
    mode
        A mode, such as eager or jit; repeatable. By default all; of digest eager.
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

    The signature and small calls tell what the target expects, and that is printed. Options say it where it is found
    wrong. The exit status is 0 if all is right or accepted, and 1 if something is wrong or of another convention. It is
    2 if the command cannot be run as given, and 3 if a case crashed or took too long. It is 4 if nothing else is wrong,
    and a parameter of the target is unknown.

    Parameters
    ----------
    target
        module:callable, file.py:callable, or a preset such as torch.sdpa.
    timeout
        Seconds for each case.
    write_expected
        Write what is wrong to such a file.
    untrusted
        For generated kernels: compared in another process.
    strict
        Status 1, too, where little was checked.
    """

    target: Annotated[str, typer.Argument()]
    timeout: Seconds = 60.0
    write_expected: Path | None = None
    untrusted: bool = False
    strict: bool = False


@command("Find where two models part.", "attention_cli.compare:compare")
@dataclass(frozen=True)
class Compare(Apart):
    """Run two models or layers on the same input, each in its framework, and say where they part, and why.

    A model is a file of this project, a GGUF file, a folder of transformers, a .keras file, or file.py:name. With a
    framework in front, as in jax:FOLDER, the layers of this project run the same weights there.

    The exit status is 0 if all places are within the bound, and 1 if not. It is 2 if the models cannot be compared, and
    3 if one crashed or took too long.

    Parameters
    ----------
    first
        A model: what the other is compared with.
    second
        Another model.
    input
        token_ids or x, key_mask, mask, as safetensors, npz or npy. By default they are drawn.
    bound
        In ulps of the largest number of a position, besides what rounding explains.
    timeout
        Seconds for each step, such as a run of a model.
    verbose
        All places, not the first that differ.
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

    In the layout attention-core the settings are in the file. Of any other layout, the options say what arrays do not
    tell. The exit status is 0 if the target was written, 1 if the weights cannot be converted, and 2 if the command
    cannot be run as given.

    Parameters
    ----------
    source
        A file of safetensors; of causal-lm, a folder; of gguf, its file.
    target
        The file to be written.
    from_
        The layout of the source, gguf or out of attention-core, torch, torch-encoder-layer, torch-decoder-layer,
        equinox, keras, keras-grouped, flax, bert, bert-layer, bert-embeddings, causal-lm.
    to
        The layout of the target, out of attention-core, torch, torch-encoder-layer, torch-decoder-layer, equinox,
        keras, keras-grouped, flax, bert, bert-layer, bert-embeddings, causal-lm.
    num_heads
        The number of query heads of the source.
    zero_attention
        add_zero_attn of the source.
    norm_first
        norm_first of the source.
    epsilon
        The epsilon of normalizations of the source.
    activation
        relu or gelu: the activation of the source.
    dropout
        The rate of dropout of the source.
    padding_idx
        Of positions of RoBERTa; -1 for those of BERT.
    prefix
        What the names of the arrays of the source begin with.
    drop
        Leave out arrays whose names, less the prefix, begin so; repeatable.
    force
        Replace the target if it is there.
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
    """Continue texts by a language model, on one backend. A folder of --model has a tokenizer.json.

    The text of one prompt is printed as it comes; then the speed, and for each prompt the SHA-256 of all its logits. In
    reproducible arithmetic the hash is that of every backend, mode and batch. The exit status is 0 if the text is
    complete, and 2 if the command cannot be run as given.

    Parameters
    ----------
    prompts
        Texts to be continued, as one batch.
    backend
        The backend, by default numpy.
    mode
        How a step is run, such as eager, jit, graph or compiled.
    arithmetic
        fast or reproducible.
    max_new_tokens
        At most so many tokens are made.
    cache_dtype
        Of the cache, such as bfloat16; by default that of the weights.
    tokenizer
        A tokenizer.json, in the place of that of the model.
    chat
        Ask in the format of ChatML, as instructed models do.
    temperature
        0 takes the most probable token.
    top_k
        Draw among so many tokens.
    top_p
        Draw among tokens of so much probability, in (0, 1].
    seed
        Of what is drawn.
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
    """Look at weights: as one HTML file without network, or as text.

    The exit status is 0 if the view was made, and 2 if the command cannot be run as given.

    Parameters
    ----------
    files
        Weights, or query and key, as npz, npy or safetensors; a second file is compared.
    output
        An HTML file. By default text is printed.
    tokens
        Tokens: a list in JSON, or one in each line.
    image
        What queries and keys are patches of: PNG or JPEG.
    class_tokens
        Class or register tokens before the patches.
    query
        The query that is looked at first: its number, or R,C on the image; repeatable.
    head
        A head; repeatable. By default all.
    sample
        Of the batch.
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


@command("Hash a call or a saved layer in every way of running.", "attention_cli.digest:digest")
@dataclass(frozen=True)
class Digest(Ways):
    """Hash the results of a call of attention, or of a saved layer, on given inputs, with SHA-256.

    A call takes query, key, value and, if they are there, mask and bias. A layer takes its own arguments, by name.
    Reproducible arithmetic computes them by an eager call on every backend, again in small blocks, and with the samples
    of a batch apart. --mode asks for compiled calls, and --threads, which is repeatable, for a process with so many
    threads. With --chain or --against, a language model has a hash for each layer and token instead, and the first that
    differs is told.

    The exit status is 0 if all bits are the same (and as expected), 1 if not, and 2 if the command cannot be run as
    given.

    Parameters
    ----------
    files
        Inputs as safetensors, and at most one saved layer; a model with --chain.
    scale
        The scale of a call without a layer.
    softcap
        The softcap of a call without a layer.
    sha256
        The hash that is expected, of 64 hex digits.
    chain
        Of a language model: write a hash for each layer and token to this file.
    against
        Compare them with such a file of another machine: where do the two part?
    arithmetic
        Of the hashes for each layer and token: reproducible or fast.
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
    the published one. Eager calls run again in small blocks, with the samples of a batch apart, and with one thread.
    --model adds the case model, of an encoder of BERT's type or a language model of Llama's.

    The exit status is 0 if all results keep their bounds, 1 if not (or if nothing could be run), and 2 if the command
    cannot be run as given.

    Parameters
    ----------
    dtype
        A floating-point type; repeatable. By default all.
    implementation
        dense, blockwise or fused; repeatable. By default all three, less where compiled.
    case
        Cases by name, * and ? allowed; repeatable. By default all.
    list_
        List the cases and what they show, and run none.
    quick
        Run eager calls in float32 alone, or one eager call where bits are compared.
    identical
        Compare bits instead, in reproducible arithmetic, with published ones.
    long
        Run a language model in all modes, and compare the bits of 8 prompts.
    """

    dtype: Many = None
    implementation: Many = None
    case: Many = None
    model: Path | None = None
    list_: bool = False
    quick: bool = False
    identical: bool = False
    long: bool = False
