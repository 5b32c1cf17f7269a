"""How likely given continuations of contexts are (``score``), and which are the likeliest (``go_on``)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dla.models.cache import DLACache
from dla.models.forest import Level, Node, Reader

LOGITS = 1 << 25  # numbers made at a time
Span = tuple[int, int, int]  # a question and the positions, first and last + 1, whose predictions it asks about


@dataclass
class Question:
    """What the log-probability of ``targets`` is, each predicted by one of the last ``tokens``."""

    tokens: Sequence[int]
    targets: Sequence[int]


def score(reader: Reader, questions: Sequence[Question], done: Callable[[int, float, bool], None]) -> None:
    """Answer questions in any order: ``done`` gets the number of the question, the sum of the log-probabilities of its
    targets, and whether each of them was the likeliest token.
    """
    ends, roots = reader.lay_out([question.tokens for question in questions])
    asked: dict[Node, list[Span]] = {}
    for number, (question, end) in enumerate(zip(questions, ends, strict=True)):
        first = len(question.tokens) - len(question.targets)
        for node in end.path():
            if node.end > first:
                asked.setdefault(node, []).append((number, max(first, node.start), node.end))
    sums, greedy = [0.0] * len(questions), [True] * len(questions)
    left = [len(question.targets) for question in questions]
    context = max((len(question.tokens) for question in questions), default=1)
    for made in reader.read(roots, reader.rows_that_fit(context)):
        for level, hidden in zip(made.levels, made.hidden, strict=True):
            for number, found, best in _answers(reader, questions, asked, level, hidden):
                sums[number] += sum(found)
                greedy[number] &= all(best)
                left[number] -= len(found)
                if left[number] == 0:
                    done(number, sums[number], greedy[number])


def _answers(
    reader: Reader, questions: Sequence[Question], asked: dict[Node, list[Span]], level: Level, hidden: Tensor
) -> Iterator[tuple[int, list[float], list[bool]]]:
    """Question, log-probabilities and which are likeliest, for what is asked about a level's tokens."""
    counts: list[tuple[int, int]] = []
    places: list[Tensor] = []
    targets: list[int] = []
    for node, offset in zip(level.nodes, level.offsets, strict=True):
        for number, first, last in asked.get(node, ()):
            question = questions[number]
            behind = len(question.tokens) - len(question.targets)
            counts.append((number, last - first))
            places.append(torch.arange(first, last) + (offset - node.start))
            targets += question.targets[first - behind : last - behind]
    if not counts:
        return
    device = hidden.device
    found, best = _probabilities(reader, hidden, torch.cat(places).to(device), torch.tensor(targets, device=device))
    values, likeliest, at = found.tolist(), best.tolist(), 0
    for number, count in counts:
        yield number, values[at : at + count], likeliest[at : at + count]
        at += count


@torch.inference_mode()
def _probabilities(reader: Reader, hidden: Tensor, places: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """For targets [n] predicted at places [n] of hidden [tokens, hidden]: log-probabilities; which are likeliest.

    A place asked about several times has its logits made once; no more than ``LOGITS`` numbers are held.
    """
    places, which = places.unique(return_inverse=True)
    found = hidden.new_zeros(len(targets), dtype=torch.float64)
    best = torch.zeros_like(targets, dtype=torch.bool)
    step = max(1, LOGITS // reader.model.config.vocab_size)
    for start in range(0, len(places), step):
        logits = reader.logits(hidden[places[start : start + step]])
        mine = ((which >= start) & (which < start + step)).nonzero()[:, 0]
        row, target = which[mine] - start, targets[mine]
        found[mine] = (logits[row, target] - logits.logsumexp(-1)[row]).double()
        best[mine] = logits.argmax(-1)[row] == target
    return found, best


def go_on(
    reader: Reader,
    contexts: Sequence[Sequence[int]],
    most: Sequence[int],
    stops: Callable[[int, list[int]], bool],
    most_rows: int = 64,
) -> Iterator[tuple[int, list[int]]]:
    """The likeliest tokens after each context, one by one: (number of the context, tokens) as they are finished.

    Args:
        most: tokens for each context.
        stops: gets the number of the context and its tokens so far, and says whether they are all.
        most_rows: contexts that go on together.
    """
    ends, roots = reader.lay_out(contexts, more=sum(most))
    ending: dict[Node, list[int]] = {}  # the contexts that end in a node
    for number, end in enumerate(ends):
        ending.setdefault(end, []).append(number)
    longest = max(map(len, contexts), default=1)
    fit = min(most_rows, reader.rows_that_fit(longest, all_layers=True))
    waiting: list[tuple[list[int], Tensor, DLACache]] = []
    for made in reader.read(roots, fit, ending):
        numbers = [number for node in made.nodes for number in ending.get(node, ())]
        if numbers and made.cache is not None:
            rows = torch.tensor([row for row, node in enumerate(made.nodes) for _ in ending.get(node, ())])
            with torch.inference_mode():
                first = reader.logits(made.last()[rows.to(reader.model.device)]).argmax(-1)
                waiting.append((numbers, first, made.cache.select(rows)))
        if sum(len(some) for some, _, _ in waiting) >= fit:
            yield from _decode(reader, waiting, most, stops)
            waiting = []
    if waiting:
        yield from _decode(reader, waiting, most, stops)


def _decode(
    reader: Reader,
    waiting: Sequence[tuple[list[int], Tensor, DLACache]],
    most: Sequence[int],
    stops: Callable[[int, list[int]], bool],
) -> Iterator[tuple[int, list[int]]]:
    """One token a step for all contexts that want another."""
    numbers = [number for some, _, _ in waiting for number in some]
    cache = DLACache.cat([cache for _, _, cache in waiting])
    tokens = torch.cat([first for _, first, _ in waiting])
    written: dict[int, list[int]] = {number: [] for number in numbers}
    while numbers:
        alive = []
        for row, (number, token) in enumerate(zip(numbers, tokens.tolist(), strict=True)):
            text = written[number]
            text.append(token)
            if len(text) < most[number] and not stops(number, text):
                alive.append(row)
                reader.bar.update(1)
            else:
                reader.bar.update(1 + most[number] - len(text))
                yield number, text
        numbers = [numbers[row] for row in alive]
        if not numbers:
            return
        with torch.inference_mode():
            index = torch.tensor(alive)
            cache = cache if len(alive) == len(tokens) else cache.select(index)
            step = tokens[index.to(tokens.device)][:, None]
            tokens = reader.model(step, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)
