"""What a text can be read by beside a model: other rules with the same weights, Log-Linear levels, another model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dla.layers.memory import DynamicMemory
from dla.models.causal_lm import DLAForCausalLM
from dla.names import check_known
from dla.ops.checks import check_rules
from dla.ops.rules import Merge, Rules, Score
from dla.typed import NONE, Count, NotNegative, convert

LEVELS = "levels"
RULES: dict[str, Any] = {
    "tau": NotNegative,
    "capacity": Count | None,
    "merge": Merge,
    "score": Score,
    "block": Count | None,
}
WAYS = f"a model, {LEVELS}, or rules such as score=token or merge=similarity,capacity=20"


def parse_rules(text: str) -> dict[str, Any] | None:
    """The rules that a text like "merge=similarity,tau=0.5" names; None if it names none."""
    if "=" not in text:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    check_known("--against", [name.strip() for name, _, _ in pairs], RULES)
    return {name.strip(): _value(name.strip(), value.strip()) for name, _, value in pairs}


def _value(name: str, text: str) -> Any:
    value: Any = text
    if name not in ("merge", "score"):
        try:
            value = None if text == NONE else float(text) if name == "tau" else int(text)
        except ValueError:
            value = text
    return convert(f"--against: {name}", value, RULES[name])


@contextmanager
def changed_rules(model: DLAForCausalLM, rules: Mapping[str, Any]) -> Iterator[None]:
    """The model with other rules in its dynamic memories, for as long as that lasts; its weights stay."""
    memories = [memory for memory in model.modules() if isinstance(memory, DynamicMemory)]
    if not memories:
        raise ValueError(f"rules ({', '.join(rules)}) change a dynamic memory, and the model has none")
    before, config = [dict(memory.rules) for memory in memories], model.config
    names = ("slots", "capacity")
    kept = {name: getattr(config, name) for name in names}
    check_rules(Rules(**{**before[0], **rules}))
    config.slots, config.capacity = config.slot_width, rules.get("capacity", config.capacity)
    try:
        for memory in memories:
            memory.rules.update(rules)
        yield
    finally:
        for memory, own in zip(memories, before, strict=True):
            memory.rules.update(own)
        for name, value in kept.items():
            setattr(config, name, value)
