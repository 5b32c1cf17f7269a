"""The commands of `dla`: what each takes, and what of the library it runs.

A command is a function that gives its parser options, says with ``runs`` which function of the library takes them, and
returns an example of its use. It is called only when its command was asked for, so it may look choices up where they
are defined. What the library's function returns is shown by ``dla.cli``: a ``Found``, or nothing.
"""

from argparse import ArgumentParser, Namespace
from importlib import import_module
from typing import Any


def runs(parser: ArgumentParser, module: str, function: str = "run") -> None:
    """The library's function that takes the options by their names; its module is imported when it is needed."""

    def run(args: Namespace) -> Any:
        return getattr(import_module(module), function)(**given(args))

    run.where = module, function  # type: ignore[attr-defined]
    parser.set_defaults(run=run)


def given(args: Namespace) -> dict[str, Any]:
    """The options of a call by their names, without those that are the command line's own."""
    return {name: value for name, value in vars(args).items() if name not in ("run", "json")}


def json_option(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of text")
