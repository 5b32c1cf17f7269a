"""The issue model: what it reads of machine code, and that the cost model has what it says."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from benchmarks.gpu_costs import MERGE
from benchmarks.gpu_issue import READ, cycles, innermost, instructions, main
from dla.ops.gpu.runtime import interpreting


def line(at: int, text: str, stall: int, sets: int = 7, reads: int = 7, awaits: int = 0) -> str:
    high = stall << 41 | sets << 46 | reads << 49 | awaits << 52
    return f"        /*{at:04x}*/   {text} ;   /* 0x{at:016x} */\n        /* 0x{high:016x} */\n"


LOOP = (
    line(0, "MOV R1, R2", 5)
    + ".L_x_1:\n"
    + line(16, "LDG.E R0, [R2.64]", 1, sets=2)
    + line(32, "IADD3 R1, R1, R0, RZ", 4, awaits=1 << 2)
    + line(48, "@P0 STG.E [R2.64], R1", 1, reads=0)
    + line(64, "IADD3 R2, R2, 0x4, RZ", 2, awaits=1)
    + line(80, "@P0 BRA `(.L_x_1)", 5)
)


def test_what_is_read() -> None:
    found, labels = instructions(LOOP)
    assert [x.name for x in found] == ["MOV", "LDG", "IADD3", "STG", "IADD3", "BRA"] and labels == {".L_x_1": 1}
    assert [x.stall for x in found] == [5, 1, 4, 1, 2, 5] and found[2].awaits == [2] and found[5].jumps_to == ".L_x_1"
    assert found[1].sets == [(2, 40)] and found[3].sets == [(0, READ)] and found[0].sets == []


def test_a_round_by_hand() -> None:
    """The load's result after 40 cycles, 4 for the sum, the store's operands after 15, then 2 and the jump."""
    assert cycles(innermost(LOOP, "STG")) == 40 + 4 + READ + 2 + 5
    with pytest.raises(ValueError, match="REDUX"):
        innermost(LOOP, "REDUX")


@pytest.mark.skipif(interpreting(), reason="Triton interprets its kernels in this process")
def test_the_cost_model_has_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert f"{MERGE} cycles a boundary" in told, told
