"""`dla generate`: text from a model as it comes, and what it took."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from dla.models.cache import DLACache, check_cache
from dla.models.causal_lm import DLAForCausalLM
from dla.models.config import DLAConfig
from dla.models.info import kv_cache_bytes
from dla.models.load import find_config, is_preset, load_model
from dla.text import ByteTokenizer, decoder, model_tokenizer, without_escapes


@dataclass
class Sampling:
    """How the next token is chosen: the likeliest at temperature 0, else at random."""

    temperature: float = 0.0
    top_p: float = 1.0  # among the likeliest tokens that together have this probability
    top_k: int = 0  # among so many likeliest tokens; 0: no limit
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0: no limit), got {self.top_k}")
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
class Options:
    """What `dla generate` was asked for."""

    model: str  # a folder or a preset
    prompt: str | None = None  # None: from the file, or else from stdin
    file: Path | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    dtype: str = "float32"
    tokenizer: str | None = None
    memory: str | None = None  # of a preset
    prefill_chunk: int = 4096
    load_context: Path | None = None
    save_context: Path | None = None
    tau: float | None = None
    capacity: int | None = None
    device: str | None = None  # None: the GPU if there is one
    json: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be >= 0, got {self.max_new_tokens}")
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be >= 1, got {self.prefill_chunk}")
        if self.tau is not None and not self.tau >= 0:
            raise ValueError(f"tau must be >= 0, got {self.tau}")
        if self.capacity is not None and self.capacity < 2:
            raise ValueError(f"capacity must be >= 2, got {self.capacity}")
        if self.prompt is not None and self.file is not None:
            raise ValueError("give a prompt or a file, not both")
        for name in ("file", "load_context"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"{name} is not a file: {path}")
        if self.save_context is not None and not self.save_context.absolute().parent.is_dir():
            raise ValueError(f"save_context is to go to a folder that does not exist: {self.save_context}")


@dataclass
class Figures:
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

    def settle(self, config: DLAConfig, cache: DLACache | None) -> None:
        """Fill in what follows from the rest."""
        self.generated_tokens = len(self.token_ids)
        if self.prompt_tokens and self.prefill_seconds:
            self.prefill_tokens_per_second = self.prompt_tokens / self.prefill_seconds
        if self.generated_tokens > 1 and self.decode_seconds:
            self.decode_tokens_per_second = (self.generated_tokens - 1) / self.decode_seconds
        if cache is not None:
            self.cached_tokens, self.state_bytes = cache.get_seq_length(), cache.nbytes
            self.kv_cache_bytes = kv_cache_bytes(config, self.cached_tokens)

    def describe(self) -> str:
        """In three lines."""
        before = f" after {self.context_tokens:,} of the context" if self.context_tokens else ""
        ended = {"stop token": ", ended by a stop token", "interrupted": ", interrupted"}.get(self.ended, "")
        return (
            f"prompt: {self.prompt_tokens:,} tokens{before} in {self.prefill_seconds:.2f} s"
            f"{_rate(self.prefill_tokens_per_second)}\n"
            f"generated: {self.generated_tokens:,} tokens in {self.decode_seconds:.2f} s"
            f"{_rate(self.decode_tokens_per_second)}{ended}\n"
            f"memory: {self.state_bytes:,} bytes for {self.cached_tokens:,} tokens; a KV cache of the same width and "
            f"depth takes {self.kv_cache_bytes:,} in bfloat16"
        )


def _rate(rate: float | None) -> str:
    return "" if rate is None else f" ({rate:,.1f} tokens/s)"


@torch.no_grad()
def read(
    model: DLAForCausalLM,
    ids: Tensor,
    cache: DLACache | None = None,
    chunk: int = 4096,
    seen: Callable[[int, DLACache], None] | None = None,
) -> tuple[Tensor, DLACache]:
    """Take in tokens [1, T >= 1], at most ``chunk`` at a time: the logits of the last [vocab], and the cache.

    ``seen`` is called with the size of each piece and the cache after it.
    """
    for piece in ids.split(chunk, dim=1):
        out = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        assert cache is not None
        if seen is not None:
            seen(piece.shape[1], cache)
    assert cache is not None
    return out.logits[0, -1], cache


def tokens(
    model: DLAForCausalLM,
    logits: Tensor,
    cache: DLACache,
    max_new_tokens: int,
    sampling: Sampling,
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
        logits, cache = read(model, torch.tensor([[token]], device=logits.device), cache)


def stop_tokens(config: DLAConfig | GenerationConfig) -> set[int]:
    """The tokens that end a text."""
    eos = config.eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)


def run(**asked: Any) -> int:
    """`dla generate` with the fields of ``Options``: text to stdout as it comes, figures to stderr; the exit code."""
    try:
        made = _Run(Options(**asked))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"dla generate: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return made.go()


def load_cache(options: Options, model: DLAForCausalLM) -> DLACache | None:
    """The context to go on from, if it is one of a model like this."""
    if options.load_context is None:
        return None
    cache = DLACache.load(options.load_context, device=str(model.device))
    try:
        check_cache(cache, model.config, batch=1)
    except ValueError as error:
        raise ValueError(f"load_context does not fit the model: {error} ({options.load_context})") from error
    return cache


def encode_prompt(options: Options, tokenizer: Any) -> Tensor:
    """The prompt's tokens [1, T]."""
    if options.prompt is not None:
        text = options.prompt
    else:
        data = sys.stdin.buffer.read() if options.file is None else options.file.read_bytes()
        text = data.decode("utf-8", errors="surrogateescape")
    if not isinstance(tokenizer, ByteTokenizer):
        text = without_escapes(text)
    # a text that goes on has been opened already
    ids = tokenizer.encode(text, add_special_tokens=options.load_context is None)
    if not ids:
        raise ValueError("the prompt is empty: at least one token is needed to go on from")
    return torch.tensor([ids])


class _Run:
    """One run, which may be interrupted at any point."""

    def __init__(self, options: Options) -> None:
        """Load what is needed, and refuse what cannot be done."""
        self.options = options
        self.sampling = Sampling(options.temperature, options.top_p, options.top_k, options.seed)
        vocab_size = find_config(options.model, options.memory).vocab_size
        self.tokenizer = model_tokenizer(options.model, options.tokenizer, vocab_size)
        self.prompt = encode_prompt(options, self.tokenizer)
        chosen = ("memory", "dtype", "device", "tau", "capacity")
        self.model = load_model(options.model, **{name: getattr(options, name) for name in chosen})
        self.cache = load_cache(options, self.model)
        self.figures = Figures(options.model, options.dtype, is_preset(options.model))
        if self.cache is not None:
            self.figures.context_tokens = self.cache.get_seq_length()
        if self.figures.random_weights:
            print(f"{options.model} is a preset: its weights are random, and so is the text", file=sys.stderr)

    def go(self) -> int:
        """Read, generate and report; the exit code."""
        code = 0
        try:
            logits = self.prefill(self.prompt.to(self.model.device))
            self.decode(logits)
        except KeyboardInterrupt:
            self.figures.ended, code = "interrupted", 130
        self.figures.settle(self.model.config, self.cache)
        self.report()
        return code

    def prefill(self, ids: Tensor) -> Tensor:
        """Read the prompt, with a progress bar if it is long, and save the context if that was asked for."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        start = time.perf_counter()
        pieces = -(-ids.shape[1] // self.options.prefill_chunk)
        quiet = pieces == 1 or not sys.stderr.isatty()
        with tqdm(total=ids.shape[1], desc="reading", unit=" tokens", leave=False, disable=quiet) as bar:

            def seen(count: int, cache: DLACache) -> None:
                self.cache = cache
                self.figures.prompt_tokens += count
                self.figures.prefill_seconds = time.perf_counter() - start
                bar.update(count)

            logits, cache = read(self.model, ids, self.cache, self.options.prefill_chunk, seen)
        if self.options.save_context is not None:
            cache.save(self.options.save_context)
        return logits

    def decode(self, logits: Tensor) -> None:
        """Generate, and show the text as it comes."""
        assert self.cache is not None
        stop, stream = stop_tokens(self.model.config), decoder(self.tokenizer)
        start = time.perf_counter()
        try:
            for token in tokens(self.model, logits, self.cache, self.options.max_new_tokens, self.sampling):
                self.figures.token_ids.append(token)
                self.figures.decode_seconds = time.perf_counter() - start
                if token in stop:
                    self.figures.ended = "stop token"
                else:
                    self.show(stream.push(token))
        finally:
            self.show(stream.finish())

    def show(self, text: str) -> None:
        self.figures.text += text
        if text and not self.options.json:
            print(text, end="", flush=True)

    def report(self) -> None:
        if self.options.json:
            print(json.dumps(asdict(self.figures), indent=2))
            return
        if self.figures.text and not self.figures.text.endswith("\n"):
            print(flush=True)
        print(self.figures.describe(), file=sys.stderr)
