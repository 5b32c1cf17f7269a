"""A text, or its tokens, read by a model and by what it is compared with."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from dla.inspect.against import LEVELS, WAYS, changed_rules, parse_rules
from dla.inspect.queries import MOST_QUERIES, ask
from dla.inspect.reading import Reading, as_levels, read_layers
from dla.models.causal_lm import DLAForCausalLM
from dla.models.load import find_config, is_preset, load_model
from dla.models.shipped import located
from dla.text import ByteTokenizer, decoder, model_tokenizer, without_escapes
from dla.typed import Natural, convert

EVEN = 4  # queries, evenly spaced, where none are named


def gather(
    model: DLAForCausalLM | str,
    text: str | Sequence[int] | Tensor,
    *,
    tokenizer: Any = None,
    queries: Sequence[int | str] | None = None,
    against: str | DLAForCausalLM | None = None,
    **options: Any,
) -> list[Reading]:
    """One reading, or two if there is something to compare with.

    Args:
        model: a model, or the name of one for ``load_model``, which takes the ``options``.
        text: or the tokens of it.
        tokenizer: an object that encodes and decodes, or a name for ``model_tokenizer``; None: the model's own.
        queries: positions of tokens (negative: from the end), or texts, for the token that ends the last occurrence of
            it; None: four of them, evenly spaced.
        against: what to compare with: another model, "levels", or rules like "merge=similarity,capacity=20".
    """
    rules = parse_rules(against) if isinstance(against, str) else None
    other = against if rules is None and against != LEVELS else None
    if isinstance(other, str):
        _check_model(other)
    coder = find_tokenizer(model, tokenizer)
    loaded = load_model(model, **options) if isinstance(model, str) else model
    ids = encode(coder, text)
    if bad := [i for i in ids if not 0 <= i < loaded.config.vocab_size]:
        raise ValueError(f"tokens must be from 0 to {loaded.config.vocab_size - 1} (vocab_size), got {bad[0]}")
    parts = pieces(coder, ids)
    at = positions(queries, parts)
    first = _noted(_read(_name(model), loaded, coder, ids, parts, at), model)
    if against is None:
        return [first]
    if against == LEVELS:
        return [first, _levels(first)]
    if rules is not None:
        with changed_rules(loaded, rules):
            return [first, _read(f"{_name(model)}, {against}", loaded, coder, ids, parts, at)]
    assert other is not None
    second = load_model(other, **_for_other(options)) if isinstance(other, str) else other
    own = find_tokenizer(other, None)
    whole = "".join(parts) if own is None or coder is None else coder.decode(ids)
    theirs = ids if own is None or type(own) is type(coder) is ByteTokenizer else encode(own, whole)
    their_parts = pieces(own, theirs)
    return [
        first,
        _noted(_read(_name(other), second, own, theirs, their_parts, _mapped(at, parts, their_parts)), other),
    ]


def _noted(reading: Reading, model: DLAForCausalLM | str) -> Reading:
    """With what there is to say of the model."""
    if not isinstance(model, str) or not is_preset(model):
        return reading
    return replace(
        reading, notes=[*reading.notes, f"{model} is a preset: its weights are random, and so is what it does."]
    )


def _check_model(name: str) -> None:
    try:
        find_config(name)
    except ValueError as error:
        raise ValueError(f"--against must be {WAYS}, got {name!r}: {error}") from error


def _for_other(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in ("dtype", "device")}


def _read(name: str, model: DLAForCausalLM, coder: Any, ids: list[int], parts: list[str], at: Sequence[int]) -> Reading:
    training = model.training
    try:
        layers = read_layers(model.eval(), ids)
        asked = list(ask(model, ids, layers, at))
    finally:
        model.train(training)
    notes = [note for query in asked for note in query.notes]
    words = {token: pieces(coder, [token])[0] for query in asked for token in query.candidates}
    return Reading(name, ids, parts, layers, asked, words, notes)


def _levels(first: Reading) -> Reading:
    note = (
        "Log-Linear levels are drawn for the same keys and values: how they would cut this text. The weights were not "
        "trained for them, so nothing is read and there are no scores."
    )
    return replace(first, name="Log-Linear levels", layers=[as_levels(one) for one in first.layers], queries=[],
                   notes=[note])  # fmt: skip


def _name(model: DLAForCausalLM | str) -> str:
    if isinstance(model, str):
        return model
    config = model.config
    return str(config.name_or_path or f"{config.backbone}, {config.memory} memory")


def find_tokenizer(model: DLAForCausalLM | str, given: Any) -> Any:
    """The tokenizer of a model; None if it is not known."""
    if given is not None and not isinstance(given, str):
        return given
    if isinstance(model, str):
        name, vocab_size = located(model), find_config(model).vocab_size
        return model_tokenizer(name, given, vocab_size)
    try:
        return model_tokenizer(model.config.name_or_path or None, given, model.config.vocab_size)
    except ValueError:
        if given is not None:
            raise
        return None


def encode(tokenizer: Any, text: str | Sequence[int] | Tensor) -> list[int]:
    """The tokens of a text; tokens [T] or [1, T] as they are."""
    if isinstance(text, Tensor):
        if text.is_floating_point() or text.dim() > 2 or (text.dim() == 2 and len(text) != 1):
            raise ValueError(f"tokens must be whole numbers [T] or [1, T], got {text.dtype} {list(text.shape)}")
        ids = [int(i) for i in text.flatten()]
    elif isinstance(text, str):
        if tokenizer is None:
            raise ValueError("tokens must be numbers for a model whose tokenizer is not known; give tokenizer=")
        ids = tokenizer.encode(text if isinstance(tokenizer, ByteTokenizer) else without_escapes(text))
    else:
        ids = convert("tokens", [int(i) for i in text], list[Natural])
    if not ids:
        raise ValueError("the text is empty: at least one token is needed")
    return ids


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of every token: together the whole text. Characters of several tokens stand with the last of these."""
    if tokenizer is None:
        return [f"⟨{token}⟩" for token in ids]
    special = set(getattr(tokenizer, "all_special_ids", ()))
    coder, made = decoder(tokenizer), []
    for token in ids:
        made.append(f"⟨{tokenizer.convert_ids_to_tokens(token)}⟩" if token in special else coder.push(token))
    made[-1] += coder.finish()
    return made


def positions(queries: Sequence[int | str] | None, parts: Sequence[str]) -> list[int]:
    """Where the queries stand, in order."""
    length = len(parts)
    if queries is None:
        return sorted({length * (i + 1) // EVEN - 1 for i in range(EVEN)} - {-1})
    found = sorted({_position(query, parts) for query in queries})
    if len(found) > MOST_QUERIES:
        raise ValueError(f"--queries may name {MOST_QUERIES} tokens at most, got {len(found)}")
    return found


def _position(query: int | str, parts: Sequence[str]) -> int:
    length = len(parts)
    if isinstance(query, str) and not query.removeprefix("-").isdecimal():
        if not query or (place := "".join(parts).rfind(query)) < 0:
            raise ValueError(
                f"--queries must name tokens by position or by their text, and {query!r} is not in the text"
            )
        return _token_at(place + len(query) - 1, parts)
    at = int(query)
    if not -length <= at < length:
        raise ValueError(f"--queries must be from {-length} to {length - 1} for {length} tokens, got {at}")
    return at % length


def _token_at(character: int, parts: Sequence[str]) -> int:
    """The token that has a character of the text."""
    for i, part in enumerate(parts):
        character -= len(part)
        if character < 0:
            return i
    return len(parts) - 1


def _mapped(at: Sequence[int], parts: Sequence[str], others: Sequence[str]) -> list[int]:
    """The same places of a text whose tokens are others."""
    ends = [sum(map(len, parts[: t + 1])) for t in at]
    return sorted({_token_at(max(end - 1, 0), others) for end in ends})
