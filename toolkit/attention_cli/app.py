"""The subcommands of ``attention-core``: their options and help. Their work is imported only when it is asked for."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from attention_conformance.kernel.options import OPTIONS, Option

app = typer.Typer(
    name="attention-core",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Many = list[str] | None
Options = TypeVar("Options")
CPUS = os.cpu_count() or 1
# Written out, as the rooms that know them import NumPy: a test compares.
LAYOUTS = "attention-core, torch, torch-encoder-layer, torch-decoder-layer, equinox, keras, keras-grouped, flax, bert"
LAYOUTS += ", bert-layer, bert-embeddings, causal-lm"
MASKS = "full, causal, window, packed, padded, padded-causal, ragged, softcap, alibi, bias, sinks"
PRESETS = "training, prefill, decode, accelerator"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attention-core {version('attention-core')}")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Attention with the same numbers on every framework, and the proof of it."""


def command(short_help: str, work: str) -> Callable[[type[Options]], type[Options]]:
    """Make a dataclass a command: its fields are the options, and its documentation is the help.

    Parameters
    ----------
    short_help : str
        The line about it in the list of commands.
    work : str
        The function that takes an instance, as ``module:name``. Its module is imported when the command runs.
    """

    def decorate(kind: type[Options]) -> type[Options]:
        def run(**options: Any) -> None:
            with resolve_name("attention_cli.terminal:refusing")():
                resolve_name(work)(kind(**options))

        run.__doc__ = kind.__doc__
        run.__annotations__ = get_type_hints(kind, include_extras=True)
        run.__signature__ = inspect.signature(kind, eval_str=True)  # type: ignore[attr-defined]
        app.command(kind.__name__.lower(), short_help=short_help)(run)
        return kind

    return decorate


@command("List backends with versions, devices, dtypes and modes.", "attention_cli.backends:backends")
@dataclass(frozen=True)
class Backends:
    """List backends: versions, devices, floating-point types and modes."""


@command("Time attention on all frameworks.", "attention_cli.bench:bench")
@dataclass(frozen=True)
class Bench:
    """Time all implementations against those of the frameworks, after checking their results.

    The exit status is 1 if a result is wrong or a process failed, and 2 if an argument is not valid.
    """

    backend: Annotated[Many, typer.Option(help="A framework; repeatable. By default all.")] = None
    candidate: Annotated[
        Many, typer.Option("--candidate", "--implementation", help="Candidates by name, * allowed; repeatable.")
    ] = None
    shape: Annotated[Many, typer.Option(help="Batch, heads, length, head dimension, as in 4,12,512,64.")] = None
    preset: Annotated[Many, typer.Option(help=f"{PRESETS}: shapes and masks; repeatable.")] = None
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads. By default as many as heads.")] = None
    q_len: Annotated[str | None, typer.Option(help="Last queries, as in 1,4,16. By default as many as keys.")] = None
    lengths: Annotated[str | None, typer.Option(help="Of a series, as in 512,1024; or the most of a preset.")] = None
    mask: Annotated[Many, typer.Option(help=f"{MASKS}; repeatable.")] = None
    direction: Annotated[Many, typer.Option(help="forward, or fwd+bwd; repeatable. By default each of them.")] = None
    dtype: Annotated[str, typer.Option(help="A floating-point type.")] = "float32"
    device: Annotated[str, typer.Option(help="cpu, or the beginning of device names, such as cuda.")] = "cpu"
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of samples. By default 5 to 30.")] = None
    seconds: Annotated[float, typer.Option(help="Time for the samples of a candidate, by default.")] = 2.0
    max_seconds: Annotated[float, typer.Option(help="Skip calls that would take more than these seconds.")] = 60.0
    threads: Annotated[int, typer.Option(min=1, help="Threads of each framework.")] = 2
    memory: Annotated[bool, typer.Option(help="Measure peak memory as well, each candidate in a process.")] = True
    json: Annotated[Path | None, typer.Option(help="Write the environment and all samples to this file.")] = None
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A table for every single problem, too.")] = False


@dataclass(frozen=True, kw_only=True)
class Ways:
    """The ways of running backends that several commands take."""

    backend: Annotated[Many, typer.Option(help="A backend; repeatable. By default all that are installed.")] = None
    device: Annotated[Many, typer.Option(help="A device, or its kind, as cuda; repeatable. By default all.")] = None
    mode: Annotated[
        Many, typer.Option(help="A mode, such as eager or jit; repeatable. By default all; of digest eager.")
    ] = None
    json: Annotated[Path | None, typer.Option(help="Write environment and results to this file.")] = None
    jobs: Annotated[int, typer.Option(min=0, help="Processes at a time, one for a backend; 0: all in this one.")] = CPUS


@dataclass(frozen=True, kw_only=True)
class Apart:
    """Options of what runs in a process of its own."""

    jobs: Annotated[
        int, typer.Option(min=0, max=1, help="Processes at a time; 0: in this one, which a crash then ends.")
    ] = 1
    json: Annotated[Path | None, typer.Option(help="Write what was found to this file.")] = None


KINDS = {
    "text": (str | None, None),
    "many": (Many, None),
    "flag": (bool, "--{}"),
    "flag or not": (bool | None, "--{0}/--no-{0}"),
    "number": (int | None, None),
}


def _shared(name: str, option: Option) -> tuple[str, Any, Any]:
    """An option that the command shares with pytest, as a field."""
    kind, words = KINDS[option.kind]
    declaration = typer.Option(*([words.format(name)] if words else []), help=option.says)
    default = False if option.kind == "flag" else None
    return name.replace("-", "_"), Annotated[kind, declaration], field(default=default, kw_only=True)


Shared: Any = make_dataclass("Shared", [_shared(*each) for each in OPTIONS.items()], frozen=True)


@command("Check any attention.", "attention_cli.check:check")
@dataclass(frozen=True)
class Check(Shared, Apart):  # type: ignore[misc]  # its fields are made of a table
    """Check any attention, in one process; `conformance` checks this project's own, in all its backends and modes.

    The signature and small calls tell what the target expects, and that is printed. Options say it where it is found
    wrong. The exit status is 0 if all is right or accepted, and 1 if something is wrong or of another convention. It is
    2 if the command cannot be run as given, and 3 if a case crashed or took too long. It is 4 if nothing else is wrong,
    and a parameter of the target is unknown.
    """

    target: Annotated[
        str, typer.Argument(help="module:callable, file.py:callable, model.onnx, or a preset such as torch.sdpa.")
    ]
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each case.")] = 60.0
    write_expected: Annotated[Path | None, typer.Option(help="Write what is wrong to such a file.")] = None
    untrusted: Annotated[bool, typer.Option(help="For generated kernels: compared in another process.")] = False
    strict: Annotated[bool, typer.Option(help="Status 1, too, where little was checked.")] = False


@command("Find where two models part.", "attention_cli.compare:compare")
@dataclass(frozen=True)
class Compare(Apart):
    """Run two models or layers on the same input, each in its framework, and say where they part, and why.

    A model is a file of this project, a GGUF file, a folder of transformers, a .keras file, or file.py:name. With a
    framework in front, as in jax:FOLDER, the layers of this project run the same weights there.

    The exit status is 0 if all places are within the bound, and 1 if not. It is 2 if the models cannot be compared, and
    3 if one crashed or took too long.
    """

    first: Annotated[str, typer.Argument(help="A model: what the other is compared with.")]
    second: Annotated[str, typer.Argument(help="Another model.")]
    input: Annotated[
        Path | None,
        typer.Option(help="token_ids or x, key_mask, mask, as safetensors, npz or npy. By default they are drawn."),
    ] = None
    bound: Annotated[
        float, typer.Option(min=0, help="In ulps of the largest number of a position, besides what rounding explains.")
    ] = 16.0
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each step, such as a run of a model.")] = 300.0
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All places, not the first that differ.")] = False


@command("Convert weights from one library's layout to another's.", "attention_cli.convert:convert")
@dataclass(frozen=True)
class Convert:
    """Convert weights from the layout of one library to that of another, bit for bit.

    In the layout attention-core the settings are in the file. Of any other layout, the options say what arrays do not
    tell. The exit status is 0 if the target was written, 1 if the weights cannot be converted, and 2 if the command
    cannot be run as given.
    """

    source: Annotated[Path, typer.Argument(help="A file of safetensors; of causal-lm, a folder; of gguf, its file.")]
    target: Annotated[Path, typer.Argument(help="The file to be written.")]
    from_: Annotated[str, typer.Option("--from", help=f"The layout of the source, gguf or out of {LAYOUTS}.")]
    to: Annotated[str, typer.Option("--to", help=f"The layout of the target, out of {LAYOUTS}.")]
    num_heads: Annotated[int | None, typer.Option(min=1, help="The number of query heads of the source.")] = None
    head_order: Annotated[
        str | None, typer.Option(help="Where heads share keys: repeat, if neighbours do, or tile, if heads apart do.")
    ] = None
    zero_attention: Annotated[bool, typer.Option("--zero-attention", help="add_zero_attn of the source.")] = False
    norm_first: Annotated[bool, typer.Option("--norm-first", help="norm_first of the source.")] = False
    epsilon: Annotated[float | None, typer.Option(help="The epsilon of normalizations of the source.")] = None
    activation: Annotated[str | None, typer.Option(help="relu or gelu: the activation of the source.")] = None
    dropout: Annotated[float | None, typer.Option(help="The rate of dropout of the source.")] = None
    padding_idx: Annotated[int | None, typer.Option(help="Of positions of RoBERTa; -1 for those of BERT.")] = None
    prefix: Annotated[str, typer.Option(help="What the names of the arrays of the source begin with.")] = ""
    drop: Annotated[
        list[str] | None, typer.Option(help="Leave out arrays whose names, less the prefix, begin so; repeatable.")
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace the target if it is there.")] = False


@command("Continue a text by a language model.", "attention_cli.generate:generate")
@dataclass(frozen=True)
class Generate:
    """Continue texts by a language model, on one backend.

    The text of one prompt is printed as it comes; then the speed, and for each prompt the SHA-256 of all its logits. In
    reproducible arithmetic the hash is that of every backend, mode and batch. The exit status is 0 if the text is
    complete, and 2 if the command cannot be run as given.
    """

    prompts: Annotated[list[str], typer.Argument(help="Texts to be continued, as one batch.")]
    model: Annotated[
        Path | None, typer.Option(help="A folder of transformers, with tokenizer.json, or a GGUF file.")
    ] = None
    backend: Annotated[str | None, typer.Option(help="The backend, by default numpy.")] = None
    mode: Annotated[str, typer.Option(help="How a step is run, such as eager, jit, graph or compiled.")] = "eager"
    arithmetic: Annotated[str, typer.Option(help="fast or reproducible.")] = "fast"
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens are made.")] = 64
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Positions of the cache, by default as many as are needed.")
    ] = None
    cache_dtype: Annotated[
        str | None, typer.Option(help="Of the cache, such as bfloat16; by default that of the weights.")
    ] = None
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json, in the place of that of the model.")] = None
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the format of ChatML, as instructed models do.")] = False
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most probable token.")] = 0.0
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among so many tokens.")] = None
    top_p: Annotated[float | None, typer.Option(help="Draw among tokens of so much probability, in (0, 1].")] = None
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0


@command("Look at weights or at a mask.", "attention_cli.view:view")
@dataclass(frozen=True)
class View:
    """Look at weights or at a mask: as one HTML file without network, as a picture, or as text.

    The exit status is 0 if the view was made, and 2 if the command cannot be run as given.
    """

    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Weights, or query and key, as npz, npy or safetensors; a second file is compared."),
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="html, png, svg or pdf. By default text is printed.")
    ] = None
    mask: Annotated[Many, typer.Option(help="Draw a mask instead: causal or window; repeatable, all must allow.")] = (
        None
    )
    length: Annotated[list[int] | None, typer.Option(min=1, help="Queries of a mask, and again: keys.")] = None
    window: Annotated[int | None, typer.Option(min=1, help="Positions on each side, of the mask window.")] = None
    offset: Annotated[int, typer.Option(help="Added to the query's position, of causal and window.")] = 0
    block: Annotated[int | None, typer.Option(min=1, help="Queries and keys of a block of a mask.")] = None
    tokens: Annotated[Path | None, typer.Option(help="Tokens: a list in JSON, or one in each line.")] = None
    image: Annotated[Path | None, typer.Option(help="What queries and keys are patches of: PNG or JPEG.")] = None
    class_tokens: Annotated[int, typer.Option(min=0, help="Class or register tokens before the patches.")] = 0
    query: Annotated[
        Many, typer.Option(help="The query that is looked at first: its number, or R,C on the image; repeatable.")
    ] = None
    head: Annotated[list[int] | None, typer.Option(help="A head; repeatable. By default all.")] = None
    sample: Annotated[int, typer.Option(help="Of the batch.")] = 0
    reduction: Annotated[str, typer.Option(help="Of several weights in a cell: max or mean.")] = "max"
    causal: Annotated[bool, typer.Option("--causal", help="is_causal, of query and key.")] = False


@command("Hash a call or a saved layer in every way of running.", "attention_cli.digest:digest")
@dataclass(frozen=True)
class Digest(Ways):
    """Hash the results of a call of attention, or of a saved layer, on given inputs, with SHA-256.

    A call takes query, key, value and, if they are there, mask and bias. A layer takes its own arguments, by name.
    Reproducible arithmetic computes them by an eager call on every backend, again in small blocks, and with the samples
    of a batch apart. --mode asks for compiled calls, and --threads for processes with numbers of threads. With --chain
    or --against, a language model has a hash for each layer and token instead, and the first that differs is told.

    The exit status is 0 if all bits are the same (and as expected), 1 if not, and 2 if the command cannot be run as
    given.
    """

    files: Annotated[
        list[Path], typer.Argument(help="Inputs as safetensors, and at most one saved layer; a model with --chain.")
    ]
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="A number of threads to run with, too; repeatable.")
    ] = None
    causal: Annotated[bool, typer.Option("--causal", help="is_causal of a call without a layer.")] = False
    scale: Annotated[float | None, typer.Option(help="The scale of a call without a layer.")] = None
    softcap: Annotated[float | None, typer.Option(help="The softcap of a call without a layer.")] = None
    sha256: Annotated[str | None, typer.Option(help="The hash that is expected, of 64 hex digits.")] = None
    chain: Annotated[
        Path | None, typer.Option(help="Of a language model: write a hash for each layer and token to this file.")
    ] = None
    against: Annotated[
        Path | None, typer.Option(help="Compare them with such a file of another machine: where do the two part?")
    ] = None
    arithmetic: Annotated[str, typer.Option(help="Of the hashes for each layer and token: reproducible or fast.")] = (
        "reproducible"
    )


@command("Check this project on your machine.", "attention_cli.conformance:conformance")
@dataclass(frozen=True)
class Conformance(Ways):
    """Check this project's own attention, in all its backends and modes; `check` checks any other.

    Each result of a catalogue of cases is compared with an oracle of higher precision. With --identical, run another
    catalogue in reproducible arithmetic, in every mode of every backend, and compare the SHA-256 of each result with
    the published one. Eager calls run again in small blocks, with the samples of a batch apart, and with one thread.

    The last lines say what was proved.

    The exit status is 0 if all results keep their bounds, 1 if not (or if nothing could be run), and 2 if the command
    cannot be run as given.
    """

    dtype: Annotated[Many, typer.Option(help="A floating-point type; repeatable. By default all.")] = None
    implementation: Annotated[
        Many, typer.Option(help="dense, blockwise or fused; repeatable. By default all three, less where compiled.")
    ] = None
    case: Annotated[Many, typer.Option(help="Cases by name, * and ? allowed; repeatable. By default all.")] = None
    model: Annotated[
        Path | None,
        typer.Option(
            help="With --identical, the case model: a folder of transformers with an encoder of BERT's type or a"
            " language model of Llama's, or a GGUF file."
        ),
    ] = None
    list_: Annotated[bool, typer.Option("--list", help="List the cases and what they show, and run none.")] = False
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Run eager calls in float32 alone, or one eager call where bits are compared."),
    ] = False
    identical: Annotated[
        bool, typer.Option("--identical", help="Compare bits instead, in reproducible arithmetic, with published ones.")
    ] = False
    long: Annotated[
        bool, typer.Option("--long", help="Run a language model in all modes, and compare the bits of 8 prompts.")
    ] = False
