"""The table of what kernels take."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from benchmarks import gpu_resources
from dla.bench import gpu_resources as figures
from dla.ops.gpu.compile import Resources
from dla.ops.gpu.launch import Launch
from dla.ops.gpu.runtime import interpreting
from dla.ops.gpu.shapes import PAPER, Launched

pytestmark = pytest.mark.skipif(interpreting(), reason="Triton interprets its kernels in this process")


def test_every_launch_is_a_row_once() -> None:
    def fake(launch, architecture, folder):
        return Resources(architecture, 0, 1024, launch.warps)

    found = list(figures.compiled((80, 90), compile_one=fake))
    keys = [(x.of.shape, x.of.stage, x.name, x.of.launch.grid, x.architecture) for x in found]
    assert len(set(keys)) == len(keys) and {x.architecture for x in found} == {80, 90}
    decode = {x.name for x in found if x.of.stage == "decode"}
    assert decode == {"step_one", "step_levels", "step_decisions", "step_states"}
    assert found[0].row()["registers"] == 80 and found[0].figures()["warps"] == found[0].of.launch.warps


def test_the_script_fills_the_tables_and_complains(tmp_path: Path, monkeypatch, capsys) -> None:
    """A row has the most that any way of a kernel takes, and the fewest that run at once."""
    document = tmp_path / "gpu.md"
    document.write_text("".join(f"<!-- resources {x.name} -->\n<!-- end resources {x.name} -->\n" for x in PAPER))
    launch = Launch(SimpleNamespace(__name__="step"), (1,), {}, 4, 1)

    def made(stage: str, registers: int, spills: int) -> figures.Compiled:
        of = Launched(PAPER[0].name, "single", stage, launch)
        return figures.Compiled(of, 80, Resources(registers, spills, 2048, 4))

    for spills, code in ((0, 0), (8, 1)):
        found = [made("attend", 32, spills), made("gradients", 40, 0)]
        monkeypatch.setattr(gpu_resources, "compiled", lambda architectures, found=found: found)
        assert gpu_resources.main(["--document", str(document)]) == code
        cells = [cell.strip() for cell in document.read_text().splitlines()[3].split("|")]
        assert cells[1:] == ["step", "attend, gradients", "4", "40", str(spills), "2.0", "12", ""]
    assert "step spills 8 bytes on sm_80" in capsys.readouterr().out
