"""`dla generate`: text from a model as it comes, and what it took."""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import GenerationConfig

from dla.models.cache import DLACache, check_cache
from dla.models.causal_lm import DLAForCausalLM
from dla.models.config import Capacity, DLAConfig
from dla.models.info import kv_cache_bytes
from dla.models.load import find_config, is_preset, load_model
from dla.models.shipped import located
from dla.report.found import Found
from dla.text import ByteTokenizer, decoder, model_tokenizer, without_escapes
from dla.typed import Count, Limit, Natural, NotNegative, Seed, check_fields, convert

INTERRUPTED = 130  # the exit code of the command line


@dataclass
class Sampling:
    """How the next token is chosen: the likeliest at temperature 0, else at random."""

    temperature: NotNegative = 0.0
    # among the likeliest tokens that together have this probability
    top_p: Annotated[float, Limit("a number above 0, 1 at most", lambda x: 0 < x <= 1)] = 1.0
    top_k: Natural = 0  # among so many likeliest tokens; 0: no limit
    seed: Seed | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        self._generator = torch.Generator()
        if self.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(self.seed)

    def pick(self, logits: Tensor) -> int:
        """The next token by logits [vocab]."""
        if self.temperature == 0:
            return int(logits.argmax())
        logits, tokens = (logits.float().cpu() / self.temperature).sort(descending=True)
        if self.top_k:
            logits, tokens = logits[: self.top_k], tokens[: self.top_k]
        p = logits.softmax(-1)
        p = torch.where(p.cumsum(-1) - p < self.top_p, p, 0)  # without those whose betters have top_p already
        return int(tokens[torch.multinomial(p, 1, generator=self._generator)])


@dataclass
class GenerationFigures:
    """What a run did, up to where it got."""

    model: str
    dtype: str
    random_weights: bool
    context_tokens: int = 0  # from a loaded context
    prompt_tokens: int = 0  # read
    prefill_seconds: float = 0.0
    prefill_tokens_per_second: float | None = None
    generated_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens_per_second: float | None = None  # of all tokens but the first, which costs no step of its own
    cached_tokens: int = 0
    state_bytes: int = 0
    kv_cache_bytes: int = 0  # of a Transformer of the same width and depth, in bfloat16
    ended: str = "length"  # or "stop token", "interrupted"
    token_ids: list[int] = field(default_factory=list)
    text: str = ""

    def settle(self, config: DLAConfig, cache: DLACache) -> None:
        """Fill in what follows from the rest."""
        self.generated_tokens = len(self.token_ids)
        if self.prompt_tokens and self.prefill_seconds:
            self.prefill_tokens_per_second = self.prompt_tokens / self.prefill_seconds
        if self.generated_tokens > 1 and self.decode_seconds:
            self.decode_tokens_per_second = (self.generated_tokens - 1) / self.decode_seconds
        self.cached_tokens, self.state_bytes = cache.get_seq_length(), cache.nbytes
        self.kv_cache_bytes = kv_cache_bytes(config, self.cached_tokens)

    def describe(self) -> str:
        """In three lines."""
        before = f" after {self.context_tokens:,} of the context" if self.context_tokens else ""
        ended = {"stop token": ", ended by a stop token", "interrupted": ", interrupted"}.get(self.ended, "")
        rates = [self.prefill_tokens_per_second, self.decode_tokens_per_second]
        read, wrote = ("" if rate is None else f" ({rate:,.1f} tokens/s)" for rate in rates)
        return (
            f"prompt: {self.prompt_tokens:,} tokens{before} in {self.prefill_seconds:.2f} s{read}\n"
            f"generated: {self.generated_tokens:,} tokens in {self.decode_seconds:.2f} s{wrote}{ended}\n"
            f"memory: {self.state_bytes:,} bytes for {self.cached_tokens:,} tokens; a KV cache of the same width and "
            f"depth takes {self.kv_cache_bytes:,} in bfloat16"
        )


@torch.no_grad()
def read(model: DLAForCausalLM, ids: Tensor, cache: DLACache, chunk: int = 4096) -> Iterator[Tensor]:
    """Take tokens [1, T] into the cache, at most ``chunk`` at a time: the logits [vocab] after each piece."""
    for piece in ids.split(chunk, dim=1):
        yield model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]


def tokens(
    model: DLAForCausalLM, logits: Tensor, cache: DLACache, max_new_tokens: int, sampling: Sampling
) -> Iterator[int]:
    """The tokens after those that gave ``logits`` and ``cache``, one by one, up to a stop token of the model's config.

    The cache takes in all but the last.
    """
    stop = stop_tokens(model.config)
    for left in range(max_new_tokens, 0, -1):
        token = sampling.pick(logits)
        yield token
        if token in stop or left == 1:
            return
        (logits,) = read(model, torch.tensor([[token]], device=logits.device), cache)


def stop_tokens(config: DLAConfig | GenerationConfig) -> set[int]:
    """The tokens that end a text."""
    eos = config.eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)


def run(
    model: str,
    *,
    prompt: str | None = None,
    file: Path | None = None,
    max_new_tokens: int = 128,
    prefill_chunk: int = 4096,
    tokenizer: str | None = None,
    load_context: Path | None = None,
    save_context: Path | None = None,
    dtype: str = "float32",
    tau: float | None = None,
    capacity: int | None = None,
    stream: bool = False,
    memory: str | None = None,
    device: str | None = None,
    **sampling: Any,
) -> Found:
    """Go on from a prompt; an interrupt ends it with what there is so far.

    Args:
        prompt: None: from the ``file``, or else from stdin.
        tokenizer: as for ``model_tokenizer``; None: the model's own.
        load_context, save_context: a file to go on from, and one for the context after the prompt.
        stream: print the text as it comes, and how long it took to stderr.
        model, memory, dtype, device, tau, capacity: as for ``load_model``.
        sampling: as for ``Sampling``.
    """
    chosen = Sampling(**sampling)
    convert("max_new_tokens", max_new_tokens, Natural)
    convert("prefill_chunk", prefill_chunk, Count)
    convert("tau", tau, NotNegative | None)
    convert("capacity", capacity, Capacity | None)
    if prompt is not None and file is not None:
        raise ValueError("give a prompt or a file, not both")
    for name, path in (("file", file), ("load_context", load_context)):
        if path is not None and not path.is_file():
            raise ValueError(f"{name} is not a file: {path}")
    if save_context is not None and not save_context.absolute().parent.is_dir():
        raise ValueError(f"save_context is to go to a folder that does not exist: {save_context}")
    coder = model_tokenizer(located(model), tokenizer, find_config(model, memory).vocab_size)
    ids = encode_prompt(coder, prompt, file, opens=load_context is None)
    loaded = load_model(model, memory=memory, dtype=dtype, device=device, tau=tau, capacity=capacity)
    cache = DLACache(loaded.config.num_hidden_layers) if load_context is None else load_cache(load_context, loaded)
    figures = GenerationFigures(model, dtype, is_preset(model), context_tokens=cache.get_seq_length())
    try:
        logits = _prefill(loaded, ids.to(loaded.device), cache, prefill_chunk, figures)
        if save_context is not None:
            cache.save(save_context)
        _decode(figures, loaded, coder, tokens(loaded, logits, cache, max_new_tokens, chosen), stream)
    except KeyboardInterrupt:
        figures.ended = "interrupted"
    figures.settle(loaded.config, cache)
    if stream:
        if figures.text and not figures.text.endswith("\n"):
            print(flush=True)
        print(figures.describe(), file=sys.stderr)
    notes = [f"{model} is a preset: its weights are random, and so is the text"] if figures.random_weights else []
    code = INTERRUPTED if figures.ended == "interrupted" else 0
    return Found("" if stream else figures.text, asdict(figures), notes=notes, code=code)


def load_cache(path: Path, model: DLAForCausalLM) -> DLACache:
    """A context to go on from, if it is one of a model like this."""
    cache = DLACache.load(path, device=str(model.device))
    try:
        check_cache(cache, model.config, batch=1)
    except ValueError as error:
        raise ValueError(f"load_context does not fit the model: {error} ({path})") from error
    return cache


def encode_prompt(tokenizer: Any, prompt: str | None, file: Path | None, opens: bool) -> Tensor:
    """The prompt's tokens [1, T]; one that ``opens`` a text gets the tokens that begin it."""
    if prompt is None:
        if file is None and sys.stdin.isatty():
            print("the text to go on from, then Ctrl-D:", file=sys.stderr)
        data = sys.stdin.buffer.read() if file is None else file.read_bytes()
        prompt = data.decode("utf-8", errors="surrogateescape")
    if not isinstance(tokenizer, ByteTokenizer):
        prompt = without_escapes(prompt)
    ids = tokenizer.encode(prompt, add_special_tokens=opens)
    if not ids:
        raise ValueError("the prompt is empty: at least one token is needed to go on from")
    return torch.tensor([ids])


def _prefill(model: DLAForCausalLM, ids: Tensor, cache: DLACache, chunk: int, figures: GenerationFigures) -> Tensor:
    """Read the prompt, with a progress bar if it is long: the logits of its last token."""
    start, length = time.perf_counter(), ids.shape[1]
    quiet = length <= chunk or not sys.stderr.isatty()
    with tqdm(total=length, desc="reading", unit=" tokens", leave=False, disable=quiet) as bar:
        for logits in read(model, ids, cache, chunk):  # noqa: B007 (the last are returned)
            figures.prompt_tokens = cache.get_seq_length() - figures.context_tokens
            figures.prefill_seconds = time.perf_counter() - start
            bar.update(figures.prompt_tokens - bar.n)
    return logits


def _decode(
    figures: GenerationFigures, model: DLAForCausalLM, tokenizer: Any, made: Iterator[int], stream: bool
) -> None:
    """Take down tokens and their text, which is shown as it comes if it is to ``stream``."""
    stop, text, start = stop_tokens(model.config), decoder(tokenizer), time.perf_counter()

    def show(new: str) -> None:
        figures.text += new
        if stream and new:
            print(new, end="", flush=True)

    try:
        for token in made:
            figures.token_ids.append(token)
            figures.decode_seconds = time.perf_counter() - start
            if token in stop:
                figures.ended = "stop token"
            else:
                show(text.push(token))
    finally:
        show(text.finish())
