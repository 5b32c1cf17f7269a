"""DLA models in lm-evaluation-harness, as `--model dla`.

lm_eval finds models in its own registry only, so this module has to be imported first:

    python -m dla.evaluation.adapter --model dla --model_args pretrained=FOLDER --tasks hellaswag

is `lm_eval` with that done. In Python, ``DLALM(...)`` goes to ``lm_eval.simple_evaluate(model=...)``.

Answers are those of lm_eval's own ``HFLM`` on the same weights, up to rounding. They come sooner, because a context
that several requests share is read once (see ``dla.models.forest``).
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    _add_special_kwargs,
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm  # type: ignore[import-untyped]

from dla.evaluation.request_cache import RequestCache
from dla.fingerprint import json_fingerprint, model_fingerprint, tokenizer_fingerprint
from dla.models.causal_lm import DLAForCausalLM
from dla.models.continuations import Question, go_on, score
from dla.models.forest import Reader
from dla.models.generate import stop_tokens
from dla.models.load import is_preset, load_model
from dla.models.shipped import located
from dla.text import ByteTokenizer, model_tokenizer
from dla.typed import Count, convert

LOOKBACK = 2  # tokens that a stop string may take more than its own encoding, as lm_eval has it
NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1, "use_cache": True}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "do_sample", "seed")  # no matter for greedy decoding

logger = logging.getLogger(__name__)

Answer = tuple[float, bool]
TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]


@dataclass
class Generation:
    """What a request wants to be written."""

    tokens: list[int]  # of the context
    until: list[str]
    most: int  # tokens to write
    lookback: int  # tokens that a stop string may be spread over
    truncated: bool


@register_model("dla")
class DLALM(TemplateLM):
    """A DLA model for lm_eval.

    Args:
        pretrained: a saved model's folder, a preset (random weights), or a model.
        tokenizer: a tokenizer, or the folder or name of one. None: the model's own, else bytes if it has 256 tokens.
        dtype: of a model that is loaded: "float32", "bfloat16" or "float16".
        device: None: the GPU if there is one; for a model given, where it is.
        max_length: in tokens; longer contexts lose their beginning. None: the model's ``max_position_embeddings``,
            which linear and dynamic memories may exceed.
        batch_tokens: read at a time. ``batch_size`` and ``max_batch_size``, which lm_eval passes, are not used.
        state_bytes: at most so many bytes of states in a batch, beside what a single sequence needs; while
            log-likelihoods are read by a CPU, which has the states of one layer at a time, at most 32 MB of them.
        fork: what going on from a copied state costs, in tokens; a context is read once if that saves more. None: an
            estimate by the memory (8 for a single state, 83 for 30 states).
        cache: a file for finished requests; the same evaluation, started again, takes them from there.
        progress: show a progress bar if stderr is a terminal.
        add_bos_token, prefix_token_id: as in ``HFLM``: whether to add special tokens (None: as the tokenizer does it);
            the token before an empty context (None: bos or, without one, eos; 0 for bytes).
    """

    def __init__(
        self,
        pretrained: str | DLAForCausalLM,
        tokenizer: Any = None,
        dtype: str = "float32",
        device: str | None = None,
        max_length: int | None = None,
        batch_tokens: int = 4096,
        cache: str | PathLike[str] | None = None,
        progress: bool = True,
        *,
        state_bytes: int = 1 << 30,
        fork: float | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        convert("max_length", max_length, Count | None)
        self.model = _model(pretrained, dtype, device)
        self.tokenizer = _tokenizer(pretrained, tokenizer, self.model)
        self.max_length = max_length or self.model.config.max_position_embeddings
        self.add_bos_token, self.custom_prefix_token_id = add_bos_token, prefix_token_id
        self.progress = progress
        self.truncated = 0  # contexts that lost their beginning
        self.reader = Reader(self.model, batch_tokens=batch_tokens, state_bytes=state_bytes, fork=fork)
        self.results = None if cache is None else RequestCache(Path(cache))
        self._device = self.model.device

    @cached_property
    def fingerprint(self) -> str:
        """Of the model, see `model_fingerprint`."""
        return model_fingerprint(self.model)

    @cached_property
    def text_fingerprint(self) -> str:
        """Of the tokenizer."""
        return tokenizer_fingerprint(self.tokenizer)

    # Text

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Stands before an empty context."""
        if self.custom_prefix_token_id is not None:
            return self.custom_prefix_token_id
        bos = getattr(self.tokenizer, "bos_token_id", None)
        token = self.eot_token_id if bos is None else bos
        if token is None:
            raise ValueError("the tokenizer has neither a bos nor an eos token; pass prefix_token_id")
        return token

    @property
    def max_gen_toks(self) -> int:
        return 256

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self.tokenizer, "name_or_path", "bytes")).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        options = _add_special_kwargs(add_special_tokens, self.add_bos_token)
        if add_special_tokens is None and has_bos_prefix(string, self.tok_decode([self.prefix_token_id], False)):
            options["add_special_tokens"] = False
        return list(self.tokenizer.encode(string, **options))

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        if isinstance(self.tokenizer, ByteTokenizer):
            return self.tokenizer.decode(tokens)
        return str(self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if isinstance(self.tokenizer, ByteTokenizer):
            raise ValueError("bytes have no chat template; leave apply_chat_template out")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    # Log-likelihoods

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        found: list[Answer] = super().loglikelihood(requests, disable_tqdm=disable_tqdm or not self._shows())
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Answer]:
        questions = [self._question(*request) for request in requests]
        lengths = (len(context) + len(continuation) for _, context, continuation in requests)
        self._tell_truncated(sum(len(x.tokens) + 1 < n for x, n in zip(questions, lengths, strict=True)))
        about = [(question.tokens, question.targets) for question in questions]
        keys, answers, missing = self._known("loglikelihood", about, Answer)

        def done(index: int, logprob: float, greedy: bool) -> None:
            number = missing[index]
            answers[number] = (logprob, greedy)
            self._remember(keys, number, answers[number])
            text = requests[number][0]
            if text is not None:  # windows of a longer text have none
                self.cache_hook.add_partial("loglikelihood", text, answers[number])

        asked = [questions[number] for number in missing]
        with self._bar("reading", disable_tqdm) as self.reader.bar:
            score(self.reader, asked, done)
        return [answers[number] for number in range(len(requests))]

    def _question(self, text: tuple[str, str] | None, context: list[int], continuation: list[int]) -> Question:
        if not context or not continuation:
            raise ValueError(f"context and continuation must have at least one token each, got {text!r}")
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens does not fit max_length={self.max_length}: {text!r}"
            )
        return Question((context + continuation)[-(self.max_length + 1) :][:-1], continuation)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[TokenRequest] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            sums[number] += logprob
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    # Generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        asked = [self._generation(*request.args) for request in requests]
        self._tell_truncated(sum(x.truncated for x in asked))
        ends = self.stop_tokens
        about = [] if self.results is None else [self.text_fingerprint, *([ends] if ends else [])]
        wanted = [(x.tokens, [*about, x.until, x.most]) for x in asked]
        keys, answers, missing = self._known("generate_until", wanted, str)

        def stops(index: int, tokens: list[int]) -> bool:
            return self._stops(asked[missing[index]], tokens)

        contexts, most = [asked[i].tokens for i in missing], [asked[i].most for i in missing]
        with self._bar("generating", disable_tqdm) as self.reader.bar:
            for index, tokens in go_on(self.reader, contexts, most, stops):
                number = missing[index]
                answers[number] = postprocess_generated_text(self.tok_decode(tokens), asked[number].until, None)
                self._remember(keys, number, answers[number])
                self.cache_hook.add_partial("generate_until", requests[number].args, answers[number])
        return [answers[number] for number in range(len(requests))]

    def _generation(self, context: str, settings: dict[str, Any]) -> Generation:
        options = normalize_gen_kwargs(settings, self.max_gen_toks)
        if options["do_sample"]:
            raise ValueError(f"DLALM decodes greedily only; sampling was asked for: {settings!r}")
        eos = None if self.eot_token_id is None else self.tok_decode([self.eot_token_id], False)
        until = [x for x in handle_stop_sequences(options.pop("until", None), eos=eos) if x]
        most = options.pop("max_gen_toks")
        unknown = [k for k, v in options.items() if k not in SAMPLING and (k not in NEUTRAL or v != NEUTRAL[k])]
        if unknown:
            raise ValueError(f"generation settings that DLALM does not know: {', '.join(unknown)} in {settings!r}")
        if not 0 < most < self.max_length:
            raise ValueError(
                f"max_gen_toks must be from 1 to {self.max_length - 1}, one less than max_length, got {most}"
            )
        begun = has_bos_prefix(context, getattr(self.tokenizer, "bos_token", None))
        tokens = self.tok_encode(context, add_special_tokens=False if begun else self.add_bos_token)
        tokens = tokens or [self.prefix_token_id]
        lookback = LOOKBACK + max((len(self.tok_encode(x, add_special_tokens=False)) for x in until), default=0)
        kept = tokens[-(self.max_length - most) :]
        return Generation(kept, until, most, lookback, truncated=len(kept) < len(tokens))

    def _stops(self, asked: Generation, tokens: list[int]) -> bool:
        """Whether a text is complete: a stop token of the model, or a stop string in the last tokens."""
        if tokens[-1] in self.stop_tokens:
            return True
        text = self.tok_decode(tokens[-asked.lookback :], False)
        return any(x in text for x in asked.until)

    @property
    def stop_tokens(self) -> list[int]:
        """Those that end a text by the model's generation_config."""
        return sorted(stop_tokens(self.model.generation_config))

    # Bookkeeping

    def _known(
        self, kind: str, asked: Sequence[tuple[Sequence[int], Any]], result: Any
    ) -> tuple[list[str], dict[int, Any], list[int]]:
        """Of requests, what is read and what is asked about it: keys for the file of results, the results of the kind
        ``result`` that are there, by the number of the request, and the numbers of the others.
        """
        if self.results is None:
            return [], {}, list(range(len(asked)))
        keys = [json_fingerprint([self.fingerprint, kind, list(tokens), about]) for tokens, about in asked]
        found = [self.results.get(key, result) for key in keys]
        missing = [number for number, value in enumerate(found) if value is None]
        return keys, {number: value for number, value in enumerate(found) if value is not None}, missing

    def _remember(self, keys: Sequence[str], number: int, value: Any) -> None:
        if self.results is not None:
            self.results.add(keys[number], value)

    def _tell_truncated(self, count: int) -> None:
        self.truncated += count
        if count:
            logger.warning(
                "%d contexts are longer than max_length=%d allows and lose their beginning", count, self.max_length
            )

    def _shows(self) -> bool:
        return self.progress and sys.stderr.isatty()

    def _bar(self, what: str, disabled: bool) -> Any:
        quiet = disabled or not self._shows()
        return tqdm(desc=what, unit=" tokens", unit_scale=True, disable=quiet, total=0)


def _model(pretrained: str | DLAForCausalLM, dtype: str, device: str | None) -> DLAForCausalLM:
    if isinstance(pretrained, DLAForCausalLM):
        return (pretrained if device is None else pretrained.to(device)).eval()
    if not isinstance(pretrained, str | PathLike):
        raise ValueError(f"pretrained must be a folder, a preset or a DLAForCausalLM, got {type(pretrained).__name__}")
    model = load_model(str(pretrained), dtype=dtype, device=device)
    if is_preset(str(pretrained)):
        logger.warning("%s is a preset: its weights are random, and so are the results", pretrained)
    return model


def _tokenizer(pretrained: str | DLAForCausalLM, given: Any, model: DLAForCausalLM) -> Any:
    if given is not None and not isinstance(given, str | PathLike):
        return given
    folder = model.name_or_path if isinstance(pretrained, DLAForCausalLM) else located(str(pretrained))
    return model_tokenizer(folder, given, model.config.vocab_size)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
