"""How many cycles a loop of one warp takes: its machine code, issued in order. For stages that wait for nothing else.

    python benchmarks/gpu_issue.py [--architecture 80]

The assembler writes into every instruction how many cycles the next one must wait, and which of six barriers it sets
or waits for. Only instructions whose latency varies set barriers; how long these take is assumed (``LATENCIES``). So
this knows what the compiler knows, and takes loads for granted that find their data in the first cache.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dla.ops.gpu.compile import disassembled
from dla.ops.gpu.launch import Launch
from dla.ops.gpu.shapes import PAPER, launched

# Cycles until a result is there, as microbenchmarks of Ampere GPUs tell it, rounded up.
LATENCIES = {"LDG": 40, "LDS": 30, "SHFL": 25, "REDUX": 30, "MUFU": 30, "I2F": 25, "F2I": 25, "S2R": 25}
OTHERS = 30  # of what else sets a barrier
READ = 15  # until an instruction has taken its operands, so that others may go to their registers
NO_BARRIER = 7
LINE = re.compile(r"/\*(?P<at>[0-9a-f]{4,})\*/\s+(?P<text>[^;]*);\s*/\* (?P<low>0x[0-9a-f]{16}) \*/")
HIGH = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/")
LABEL = re.compile(r"^(\.L_x_\d+):")


@dataclass(frozen=True)
class Instruction:
    text: str
    high: int  # the upper half of its bits

    @property
    def name(self) -> str:
        """Without its predicate and its variants."""
        return self.text.split()[int(self.text.startswith("@"))].split(".")[0]

    @property
    def stall(self) -> int:
        return max(self.high >> 41 & 15, 1)

    @property
    def sets(self) -> list[tuple[int, int]]:
        """Barriers, and after how many cycles they fall: its result is there, or its operands are read."""
        both = (self.high >> 46 & 7, LATENCIES.get(self.name, OTHERS)), (self.high >> 49 & 7, READ)
        return [(barrier, latency) for barrier, latency in both if barrier != NO_BARRIER]

    @property
    def awaits(self) -> list[int]:
        return [barrier for barrier in range(6) if self.high >> 52 >> barrier & 1]

    @property
    def jumps_to(self) -> str | None:
        found = re.search(r"BRA `\((\.L_x_\d+)\)", self.text)
        return found[1] if found else None


def instructions(code: str) -> tuple[list[Instruction], dict[str, int]]:
    """Those of a disassembly, and the number of the one behind each label."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    text = ""
    for line in code.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(found)
        elif first := LINE.search(line):
            text = first["text"].strip()
        elif text and (second := HIGH.match(line)):
            found.append(Instruction(text, int(second[1], 16)))
            text = ""
    return found, labels


def innermost(code: str, holding: str) -> list[Instruction]:
    """The shortest loop in which an instruction of this name stands."""
    found, labels = instructions(code)
    loops = [found[labels[target] : i + 1] for i, x in enumerate(found)
             if (target := x.jumps_to) in labels and labels[target] < i]  # fmt: skip
    loops = [loop for loop in loops if any(x.name == holding for x in loop)]
    if not loops:
        raise ValueError(f"no loop has an instruction {holding}")
    return min(loops, key=len)


def cycles(loop: Sequence[Instruction], rounds: int = 50) -> float:
    """Of one round, when many follow each other."""
    free_at = dict.fromkeys(range(6), 0)
    now, half = 0, 0
    for i in range(rounds):
        half = now if i == rounds // 2 else half
        for each in loop:
            now = max([now, *(free_at[barrier] for barrier in each.awaits)])
            for barrier, latency in each.sets:
                free_at[barrier] = max(free_at[barrier], now + latency)
            now += each.stall
    return (now - half) / (rounds - rounds // 2)


def merging() -> Launch:
    """The scan over boundaries, as a layer of the paper's larger model launches it."""
    return next(x.launch for x in launched(PAPER[0]) if x.launch.name == "merges")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", type=int, default=80)
    loop = innermost(disassembled(merging(), parser.parse_args(argv).architecture), "REDUX")
    print(f"merges: {len(loop)} instructions and {cycles(loop):.0f} cycles a boundary")
    return 0


if __name__ == "__main__":
    sys.exit(main())
