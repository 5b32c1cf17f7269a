"""Lets transformers find our models by itself: `AutoModelForCausalLM.from_pretrained(folder)`, nothing imported before.

transformers knows the model types that are its own or were registered, and has no list of packages to ask. So the
installed package comes with a file dla_autoload.pth, by which Python imports this module when it starts. It loads
nothing: it waits for the table of model types, and puts a place into it that imports `dla.models` when somebody
asks for our type. Every Python of the environment runs this, so it imports nothing but sys.
"""

import sys

TABLE = "transformers.models.auto.configuration_auto"
MODEL_TYPE = "dla"


class Registered(dict):
    """The model types that were registered; ours registers itself when it is asked for."""

    def __contains__(self, key: object) -> bool:
        if key == MODEL_TYPE and not super().__contains__(key):  # an import in another thread is waited for
            try:
                __import__("dla.models")
            except ImportError as error:  # of another version of transformers, say: as if we were not there
                print(f"dla: models of type {MODEL_TYPE!r} cannot be loaded: {error}", file=sys.stderr)
        return super().__contains__(key)


class Preparing:
    """A loader that loads a module as its own one does, and prepares the table in it."""

    def __init__(self, own: object) -> None:
        self.own = own

    def __getattr__(self, name: str) -> object:
        return getattr(self.own, name)

    def exec_module(self, module: object) -> None:
        self.own.exec_module(module)
        prepare(module)


class Waiting:
    """A finder that finds the table as the others do, once, and leaves."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != TABLE:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = Preparing(spec.loader)
                return spec
        return None


def prepare(module: object) -> None:
    """Put our place into a table of model types that has just been loaded."""
    table = getattr(module, "CONFIG_MAPPING", None)
    if type(getattr(table, "_extra_content", None)) is dict:
        table._extra_content = Registered(table._extra_content)


if TABLE in sys.modules:
    prepare(sys.modules[TABLE])
elif not any(type(finder) is Waiting for finder in sys.meta_path):
    sys.meta_path.insert(0, Waiting())
