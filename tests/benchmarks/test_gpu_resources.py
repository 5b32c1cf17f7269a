"""The table of what kernels take."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from benchmarks import gpu_resources
from dla.bench import gpu_resources as figures
from dla.ops.gpu.compile import Resources
from dla.ops.gpu.runtime import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="Triton interprets its kernels in this process")


def test_every_launch_is_a_row_once() -> None:
    def fake(launch, architecture, folder):
        return Resources(architecture, 0, 1024, launch.warps)

    found = list(figures.compiled((80, 90), compile_one=fake))
    keys = [(x.of.shape, x.of.stage, x.name, x.of.launch.grid, x.architecture) for x in found]
    assert len(set(keys)) == len(keys) and {x.architecture for x in found} == {80, 90}
    decode = {x.name for x in found if x.of.stage == "decode"}
    assert decode == {"step_one", "step_levels", "step_decisions", "step_states"}
    assert found[0].row()["registers"] == "80" and found[0].figures()["warps"] == found[0].of.launch.warps


def test_the_script_fills_the_table_and_complains(tmp_path: Path, monkeypatch, capsys) -> None:
    document = tmp_path / "gpu.md"
    document.write_text("<!-- resources -->\n<!-- end resources -->\n")
    for complaint, code in ((None, 0), ("step spills", 1)):
        made = SimpleNamespace(row=lambda: {"kernel": "step", "registers": "32"}, complaint=complaint)
        monkeypatch.setattr(gpu_resources, "compiled", lambda architectures, made=made: [made])
        assert gpu_resources.main(["--document", str(document)]) == code
        assert "| step" in document.read_text()
    assert "step spills" in capsys.readouterr().out
