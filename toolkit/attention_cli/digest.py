"""The command ``digest``: the SHA-256 of a call or of a saved layer, in every configuration."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import typer

from attention_cli.backends import chosen_backends
from attention_cli.conformance import (
    check_places,
    command_of,
    environment_of,
    run_all,
    run_on,
    tell_left_out,
)
from attention_cli.terminal import check_file, console, refusal, refusing
from attention_conformance.golden import chains, digest as work, identical as bits
from attention_core.backend import get_backend

if TYPE_CHECKING:
    from attention_cli.app import Digest

FLAGS = {"is_causal": "--causal", "scale": "--scale", "softcap": "--softcap"}


def digest(options: Digest, /) -> None:
    """Compute in each way, print the hash, and tell each way that gives another."""
    if options.chain or options.against:
        _digest_chain(options)
        return
    files, mode, threads, jobs, sha256 = options.files, options.mode, options.threads, options.jobs, options.sha256
    sha256 = sha256 and sha256.lower()  # some tools print capitals
    if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise refusal(f"expected --sha256 of 64 hex digits; got {options.sha256!r}")
    if threads and not jobs:
        raise refusal("expected --jobs of 1 or more with --threads, which a running process keeps; got 0")
    check_file(options.json)
    names = chosen_backends(options.backend)
    device = check_places(names, options.device, mode)
    recipe = work.Recipe(tuple(files), is_causal=options.causal, scale=options.scale, softcap=options.softcap)
    with refusing(TypeError, ValueError):
        shows = work.read(recipe).shows
    counts, jobs = threads or (), jobs if threads else 0  # to start a library takes longer than a call
    orders = work.orders(recipe, names, devices=device, modes=mode, threads=counts)
    results, described = run_all(orders, jobs, work.work)
    if not results:
        raise refusal("expected a device with float64 and the dtype of the inputs; got none")
    verdict = work.judge(results, sha256, described)
    screen = console()
    compared = " and ".join(filter(None, ("each other", verdict.compared)))
    ways = f"{len(verdict.results)} configurations, compared with {compared}"
    for line in (f"{shows}, in reproducible arithmetic: {ways}", verdict.sha256 or "no hash"):
        screen.print(line, highlight=False, soft_wrap=True)
    for line in verdict.complaints:
        screen.print(line, style="red", highlight=False, soft_wrap=True)
    tell_left_out([verdict.left_out])
    if options.json:
        words = ["digest", *(f"./{path}" if str(path).startswith("-") else str(path) for path in files)]
        words += [FLAGS[name] if value is True else f"{FLAGS[name]}={value}" for name, value in recipe.options.items()]
        expected = sha256 or verdict.sha256  # what was expected, or else found
        places = {"backend": run_on(results), "device": device or (), "mode": mode or (), "threads": counts}
        command = command_of(words, {**places, "sha256": [expected] if expected else ()}, jobs)
        hashes = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        about = {**environment_of(described), "command": command, "files": hashes}
        bits.write_json(options.json, [verdict], about)
    raise typer.Exit(bool(verdict.complaints))


def _digest_chain(options: Digest) -> None:
    """Hash each layer and token of a language model, write or compare the hashes, and tell the first that differs."""
    check_file(options.chain)
    if len(options.files) > 2 or options.sha256 or options.causal or options.json:
        raise refusal("expected a language model, and at most a file of token_ids, with --chain or --against; got more")
    model, tokens = options.files[0], options.files[1] if len(options.files) == 2 else None
    unlike, chain = "", chains.Chain()
    with refusing(TypeError, ValueError):
        other, there = ({}, {}) if options.against is None else chains.read_chain(options.against)
        prompt = chains.read_prompt(model, tokens, options.arithmetic)
        here = prompt.about
        for name in ("arithmetic", "token_ids") if there else ():
            if there[name] != here[name]:
                raise ValueError(f"expected {name} {there[name]}, as in {options.against}; got {here[name]}")
        for name in chosen_backends(options.backend):
            found = chains.chain_of(prompt, get_backend(name))
            places = sum(len(row) for rows in found.values() for row in rows)
            typer.echo(f"{name}: {len(found)} places, {places} hashes, in {options.arithmetic} arithmetic")
            difference = chains.first_unlike(chain or found, found)
            unlike = unlike or (difference and f"{name} parts from the backend before at {difference}")
            chain = chain or found
        difference = chains.first_unlike(other, chain) if there else ""
        unlike = unlike or (difference and f"parts from {options.against} at {difference}")
    if there and there["model"] != here["model"]:
        typer.echo(f"the model is not that of {options.against}: {here['model']} and {there['model']}")
        unlike = unlike or "no place differs, of these tokens"
    if options.chain is not None:
        chains.write_chain(options.chain, chain, here)
    typer.echo(unlike or "no place differs")
    raise typer.Exit(bool(unlike))
