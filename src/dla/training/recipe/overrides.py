"""Options of the command line that change a recipe: ["--optimizer.lr", "1e-3", "--run=out/x", "--steps", "100"]."""

from collections.abc import Iterator, Sequence

from dla.training.recipe.schema import NULL, SECTIONS, TYPES, Tree, merge, suggest
from dla.typed import convert, literal


def parse_overrides(arguments: Sequence[str]) -> Tree:
    """What the options set, as a file would; of an option given twice the last counts."""
    tree: Tree = {}
    for name, text in _pairs(arguments):
        dotted = _key(name)
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # bytes of the command line that are no text
            raise ValueError(f"{name} must be valid UTF-8, got {text!r}")
        value = convert(name, literal(name, text, TYPES[dotted]), TYPES[dotted], NULL)
        section, _, last = dotted.rpartition(".")
        tree = merge(tree, {section: {last: value}} if section else {last: value})
    return tree


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(option with its dashes, text of its value) of "--key value" and "--key=value"."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--") or argument == "--":
            raise ValueError(f"{argument!r} is no option; they look like --optimizer.lr 1e-3 or --optimizer.lr=1e-3")
        name, equals, text = argument.partition("=")
        if not equals:
            text = next(rest, "--")
            if text.startswith("--"):
                raise ValueError(f"{name!r} has no value; give one as {name} VALUE or {name}=VALUE")
        yield name, text


def _key(option: str) -> str:
    """The dotted name that an option means; a field's own name will do where one section alone has it."""
    name = option.removeprefix("--").replace("-", "_")
    if name in TYPES:
        return name
    if name in SECTIONS:
        fields = ", ".join(f"--{name}.{field}" for field in SECTIONS[name])
        raise ValueError(f"{option} is a section and takes no value; set one of {fields}")
    found = [dotted for dotted in TYPES if dotted.endswith(f".{name}") and "." not in name]
    if len(found) > 1:
        raise ValueError(f"{option} may mean {' or '.join(f'--{dotted}' for dotted in found)}; say which")
    if not found:
        raise ValueError(f"{option!r} is not known; the nearest is '--{suggest(name)}'")
    return found[0]
