"""The command `airllm`: demo, generate, inspect. Parses and prints; the work is done elsewhere."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import airllm
from airllm.errors import AirLLMError, OptionError

GIB = 2**30
RESIDENT_HELP = "How much of the decoder layers stays on the device; beside slots, of their dense weights [default there: all]"

app = typer.Typer(
    name="airllm",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run language models that are larger than your GPU.",
    epilog="""\b
Start here:
  airllm demo                      see it work on a built-in model, no download
  airllm inspect FOLDER            what a checkpoint needs, and what your link allows
  airllm generate FOLDER --prompt "Once upon a time"
\b
Two ways to run a model:
  streaming (default)  one layer at a time goes to the device; any causal language model
  slots                for mixtures of experts: dense weights stay on the device
                       (--resident-gb says how much of them), experts are cached
                       in a fixed number of slots (--expert-cache-gb)
""",
)


def main() -> None:
    """Entry point of the command."""
    app()


@contextmanager
def plain_errors() -> Iterator[None]:
    """A refusal of this package is one line on stderr and exit code 1; anything else keeps its traceback."""
    try:
        yield
    except AirLLMError as error:
        typer.echo(f"airllm: {shell_words(str(error))}", err=True)
        raise typer.Exit(1) from error


_SHELL_WORDS = (
    (r"(?:use )?expert_cache_backend=([\"'])none\1", "leave --expert-cache-gb out"),
    (r"expert_cache_backend=([\"'])slot\1", "--expert-cache-gb"),
    (r"(?<![\w-])device=([\"']?)([\w:]+)\1", r"--device \2"),
    (r"(?<![\w-])(expert_cache_gb|resident_gb|max_seq_len|dtype)=", lambda found: f"--{found[1].replace('_', '-')} "),
    (r"(?<![\w-])(?:expert_cache_gb|resident_gb|max_seq_len)(?!\w)", lambda found: f"--{found[0].replace('_', '-')}"),
    (r"^dtype(?!\w)", "--dtype"),
    (r"pass hf_token", "run `hf auth login`"),
)
"""What a message of the package, which speaks of keywords, is called on the command line."""


def shell_words(message: str) -> str:
    """The message with options in the place of keywords."""
    for keyword, option in _SHELL_WORDS:
        message = re.sub(keyword, option, message)
    return message


class _ShellFormatter(logging.Formatter):
    """Messages of this package as its errors are written; others with the name of who says them."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.name.partition(".")[0] == "airllm":
            return f"airllm: {shell_words(text)}"
        return f"{record.name}: {text}"


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"airllm {airllm.__version__}")
        raise typer.Exit


@app.callback()
def common(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say what is chosen, and why.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print it.")] = False,
) -> None:
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(_ShellFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[to_stderr])


@app.command(
    epilog="""\b
Examples:
  airllm demo
  airllm demo --prompt "And the king said" --max-new-tokens 100
  airllm demo --device cpu
\b
Exit code 0: all four gave the same tokens; 1: they differ.
"""
)
def demo(
    prompt: Annotated[str, typer.Option(help="The line to continue.")] = "But I say unto you",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="How many tokens to add.")] = 48,
    device: Annotated[str | None, typer.Option(help="Where to run [default: a GPU if there is one]")] = None,
) -> None:
    """Continue a line of text with plain transformers, streaming, and slots at two budgets; compare tokens and cost.

    Uses a small mixture-of-experts model that comes with the package: no download, no GPU needed, a few seconds.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    if logging.getLogger().level >= logging.WARNING:
        logging.getLogger("airllm").setLevel(logging.ERROR)  # that slots run on the CPU here is what the user wants
    import torch
    from transformers.utils import logging as transformers_logging

    from airllm.demo import format_report, run_demo

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # the matrices are too small to share: waiting for each other costs more than the work
    with plain_errors():
        require_text(prompt)
        report = run_demo(airllm.tiny_model_path(), prompt, max_new_tokens, device)
    typer.echo(format_report(report))
    if not report.identical:
        raise typer.Exit(1)


@app.command(
    epilog="""\b
Examples:
  airllm generate ./Phi-tiny-MoE-instruct --prompt "Why is the sky blue?"
  airllm generate ./Phi-tiny-MoE-instruct --prompt "Why?" --expert-cache-gb 0.75 --stream
  airllm generate ./Mixtral --prompt "Why?" --device cuda:1 --dtype float16
\b
With --expert-cache-gb (a number of GiB, or auto) a mixture of experts runs on slots;
without it any model is streamed layer by layer. `airllm inspect` says which budget fits.
"""
)
def generate(
    model: Annotated[str, typer.Argument(metavar="PATH", help="Checkpoint folder, or a model id of the hub.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add at most.")] = 64,
    expert_cache_gb: Annotated[
        str | None, typer.Option(metavar="GIB|auto", help="Run on slots, with this much device memory for experts.")
    ] = None,
    resident_gb: Annotated[str | None, typer.Option(metavar="GIB|all", help=RESIDENT_HELP)] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it is made.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda:0, cuda:1, cpu, ... [default: cuda:0]")] = None,
    dtype: Annotated[str | None, typer.Option(help="float16, bfloat16, float32 [default: the checkpoint's]")] = None,
    max_seq_len: Annotated[int, typer.Option(min=1, help="Longest prompt plus answer, in tokens.")] = 512,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit, for a model id of the hub.")] = None,
) -> None:
    """Continue a prompt with a checkpoint on disk. The text goes to stdout, what it cost to stderr."""
    options: dict[str, Any] = {"dtype": dtype, "max_seq_len": max_seq_len, "revision": revision}
    if device is not None:
        options["device"] = device
    with plain_errors():
        require_text(prompt)
        if expert_cache_gb is not None:
            budget = parse_gib("--expert-cache-gb", expert_cache_gb, "auto")
            if budget == 0:
                raise OptionError(
                    "--expert-cache-gb 0 leaves no room for a slot: give more, or auto, or leave it out to stream the model"
                )
            options |= {"expert_cache_backend": "slot", "expert_cache_gb": budget}
        if resident_gb is not None:
            options["resident_gb"] = parse_gib("--resident-gb", resident_gb, "all")
        with airllm.AutoModel.from_pretrained(model, **options) as loaded:
            answer(loaded, prompt, max_new_tokens, stream)


def parse_gib(option: str, text: str, word: str) -> float | str:
    """A number of GiB, or the one word that the option takes instead."""
    if text.strip().lower() == word:
        return word
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"{option} takes a number of GiB or {word}, got {text!r}") from None


def require_text(prompt: str) -> None:
    if not prompt:
        raise OptionError("--prompt is empty: give at least one character to continue")


def answer(model: Any, prompt: str, max_new_tokens: int, stream: bool) -> None:
    """Generate, print the text to stdout and one line of cost to stderr."""
    from transformers import TextStreamer

    if model.tokenizer is None:
        raise OptionError(f"{model.model_local_path} has no tokenizer files: put them beside config.json")
    inputs = model.tokenizer(prompt, return_tensors="pt").to(model.device)
    given = inputs["input_ids"].shape[1]
    streamer = TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    start = time.perf_counter()
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer)
    seconds = time.perf_counter() - start
    if streamer is None:
        typer.echo(model.tokenizer.decode(output[0][given:], skip_special_tokens=True))
    typer.echo(f"{cost(model, int(output.shape[1] - given), seconds)}", err=True)


def cost(model: Any, tokens: int, seconds: float) -> str:
    line = f"{tokens} tokens in {seconds:.2f} s, prompt included"
    stats = model.get_expert_cache_stats()
    if stats.get("enabled"):
        looked_up = stats["hits"] + stats["misses"]
        line += f"; {stats['slot_count']} slots, hit rate {stats['hits'] / max(1, looked_up):.2f}"
        line += f", {stats['h2d_bytes'] / GIB:.3f} GiB of experts moved"
        if stats["dense_streamed_bytes"]:
            line += f", {stats['dense_streamed_bytes'] / GIB:.3f} GiB of dense weights streamed for each token"
    return line


@app.command(
    epilog="""\b
Examples:
  airllm inspect ./Phi-tiny-MoE-instruct
  airllm inspect ./Phi-tiny-MoE-instruct --expert-cache-gb 0.75 --link-gbs 55
  airllm inspect ./Phi-tiny-MoE-instruct --vram-gb 4
  airllm inspect ./Phi-tiny-MoE-instruct --vram-gb 2 --resident-gb 0.4
\b
--link-gbs is what your link really moves, in 10^9 bytes a second: about 6 for PCIe 3 x8
or 4 x4, 12 for PCIe 3 x16, 25 for PCIe 4 x16, 55 for PCIe 5 x16.
`python benchmarks/machine.py` measures it.
"""
)
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint folder.")],
    expert_cache_gb: Annotated[float | None, typer.Option(min=0, help="Slots of this budget, in GiB.")] = None,
    vram_gb: Annotated[float | None, typer.Option(min=0, help="Slots that fit an empty card of this many GiB.")] = None,
    resident_gb: Annotated[str | None, typer.Option(metavar="GIB|all", help=RESIDENT_HELP)] = None,
    link_gbs: Annotated[float, typer.Option(min=0.001, help="Host to device, in 10^9 bytes a second.")] = 25.0,
    max_seq_len: Annotated[int, typer.Option(min=1, help="Tokens the KV cache must hold, for --vram-gb.")] = 512,
) -> None:
    """What a checkpoint is and needs: geometry, bytes of dense weights and of experts, slots, and the link's limit.

    Reads config.json and the headers of the weight files, no weights. Nothing is loaded and no GPU is touched.
    """
    from airllm.inspect_model import inspect_folder
    from airllm.inspect_text import describe
    from airllm.options import resident_gb_bytes

    if expert_cache_gb is not None and vram_gb is not None:
        raise typer.BadParameter("give --expert-cache-gb or --vram-gb, not both")
    with plain_errors():
        found = inspect_folder(folder)
        budget = None if expert_cache_gb is None else int(expert_cache_gb * GIB)
        card = None if vram_gb is None else int(vram_gb * GIB)
        resident = None if resident_gb is None else resident_gb_bytes(parse_gib("--resident-gb", resident_gb, "all"))
        for line in describe(found, budget, card, link_gbs * 1e9, max_seq_len, resident):
            typer.echo(line)


if __name__ == "__main__":
    main()
