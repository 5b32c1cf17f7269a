"""What the Triton kernels take of a GPU at the paper's shapes, by ahead-of-time compilation: none is needed for it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from dla.bench.common import Figures, say
from dla.ops.gpu.compile import Resources, resources
from dla.ops.gpu.configs import compiling_for
from dla.ops.gpu.launch import Launch
from dla.ops.gpu.shapes import PAPER, Launched, LayerShape, launched

ARCHITECTURES = {80: "A100", 90: "H100"}
MOST_SHARED = 160 * 1024  # bytes of a program

Compile = Callable[[Launch, int, Path | None], Resources]


@dataclass(frozen=True)
class Compiled:
    """A launch of a shape, and what it takes on an architecture."""

    of: Launched
    architecture: int
    takes: Resources

    @property
    def name(self) -> str:
        kernel: str = self.of.launch.kernel.__name__
        return kernel

    @property
    def complaint(self) -> str | None:
        """What is wrong with it."""
        if self.takes.spills:
            return f"{self.name} spills {self.takes.spills} bytes on sm_{self.architecture} ({self.of.shape})"
        if self.takes.shared > MOST_SHARED:
            return f"{self.name} takes {self.takes.shared} bytes of shared memory on sm_{self.architecture}"
        return None

    def figures(self) -> Figures:
        of = {"shape": self.of.shape, "memory": self.of.memory, "stage": self.of.stage, "kernel": self.name}
        return {**of, "grid": list(self.of.launch.grid), "architecture": self.architecture, **asdict(self.takes)}

    def row(self) -> dict[str, str | int]:
        """Of a table."""
        return {
            "kernel": self.name,
            "stage": f"{self.of.stage}, {self.of.memory}",
            "shape": self.of.shape,
            "GPU": ARCHITECTURES.get(self.architecture, f"sm_{self.architecture}"),
            "programs": " x ".join(str(n) for n in self.of.launch.grid if n != 1),
            "warps": self.takes.warps,
            "registers": self.takes.registers,
            "spilled bytes": self.takes.spills,
            "shared KB": f"{self.takes.shared / 1024:9.1f}",
            "at once on an SM": self.takes.programs(self.architecture),
        }


def compiled(
    architectures: Sequence[int] = (80,),
    shapes: Sequence[LayerShape] = PAPER,
    folder: Path | None = None,
    compile_one: Compile = resources,
) -> Iterator[Compiled]:
    """Everything that the shapes launch, each kernel as often as it is compiled differently."""
    seen = set()
    for shape, architecture in product(shapes, architectures):
        with compiling_for(architecture):
            every = list(launched(shape))
        for each in every:
            takes = compile_one(each.launch, architecture, folder)
            key = each.shape, each.stage, each.launch.kernel.__name__, each.launch.grid, architecture
            if (*key, takes) in seen:
                continue
            seen.add((*key, takes))
            say(f"{each.shape}: {each.launch.kernel.__name__} compiled for sm_{architecture}")
            yield Compiled(each, architecture, takes)
