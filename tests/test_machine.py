import os
import signal
import subprocess

import pytest
import torch

from dla import machine

CURE = {machine.ISA_VARIABLE: machine.ISA_WITHOUT_AMX}


@pytest.fixture
def amx(monkeypatch):
    """A CPU that advertises AMX, an environment without a choice of ours, and nothing checked yet."""
    monkeypatch.setattr(machine, "advertises_amx", lambda: True)
    monkeypatch.setenv(machine.ISA_VARIABLE, "")  # so that monkeypatch restores whatever the check sets
    monkeypatch.delenv(machine.ISA_VARIABLE)
    machine._check.cache_clear()
    yield
    machine._check.cache_clear()


def children(monkeypatch, *outcomes):
    """Let the probes end with these exit codes (or raise them); the environments that they were given."""
    seen, left = [], list(outcomes)

    def run_probe(dtype, environment):
        seen.append(dict(environment))
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(machine, "run_probe", run_probe)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_is_not_checked(amx, monkeypatch, dtype):
    seen = children(monkeypatch)
    machine.ensure_half_precision(dtype)
    assert not seen


def test_a_cpu_without_amx_is_not_checked(amx, monkeypatch):
    monkeypatch.setattr(machine, "advertises_amx", lambda: False)
    seen = children(monkeypatch)
    machine.ensure_half_precision(torch.bfloat16)
    assert not seen


@pytest.mark.filterwarnings("error")
def test_a_sound_cpu_is_checked_once_per_dtype(amx, monkeypatch):
    seen = children(monkeypatch, 0, 0)
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, torch.float16):
        machine.ensure_half_precision(dtype)
    assert len(seen) == 2
    assert machine.ISA_VARIABLE not in os.environ


def test_a_killed_child_switches_amx_off(amx, monkeypatch):
    seen = children(monkeypatch, -signal.SIGILL, 0)
    with pytest.warns(RuntimeWarning, match="bfloat16 with it kills the process .SIGILL.") as warned:
        machine.ensure_half_precision(torch.bfloat16)
        machine.ensure_half_precision(torch.bfloat16)
    assert len(warned) == 1
    assert machine.ISA_VARIABLE not in seen[0]
    assert CURE.items() <= seen[1].items()
    assert os.environ[machine.ISA_VARIABLE] == machine.ISA_WITHOUT_AMX


def test_no_cure_is_an_error(amx, monkeypatch):
    children(monkeypatch, -signal.SIGILL, -signal.SIGSEGV)
    with pytest.raises(ValueError, match=r"float16 kills .* also without AMX; use float32"):
        machine.ensure_half_precision(torch.float16)
    assert machine.ISA_VARIABLE not in os.environ


def test_a_choice_of_the_user_stays(amx, monkeypatch):
    monkeypatch.setenv(machine.ISA_VARIABLE, "AVX512_CORE_AMX")
    seen = children(monkeypatch, -signal.SIGILL)
    with pytest.raises(ValueError, match="ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX; use float32"):
        machine.ensure_half_precision(torch.bfloat16)
    assert [x[machine.ISA_VARIABLE] for x in seen] == ["AVX512_CORE_AMX"]
    assert os.environ[machine.ISA_VARIABLE] == "AVX512_CORE_AMX"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("outcome", [1, OSError("no more processes"), subprocess.TimeoutExpired("python", 1)])
def test_other_failures_say_nothing_about_the_cpu(amx, monkeypatch, outcome):
    children(monkeypatch, outcome)
    machine.ensure_half_precision(torch.bfloat16)
    assert machine.ISA_VARIABLE not in os.environ


def test_advertised_amx_is_what_the_cpu_says(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    assert machine.advertises_amx() is True
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "Path", lambda _: cpuinfo)
    assert machine.advertises_amx() is False
    cpuinfo.write_text("flags : avx512f amx_bf16 amx_tile amx_int8\n")
    assert machine.advertises_amx() is True


def test_the_probe_itself_runs():
    # Without AMX, so that it does on any machine; a mistake in the code of the probe would exit with 1.
    assert machine.run_probe(torch.bfloat16, {**os.environ, **CURE}) == 0


def test_a_signal_is_a_negative_code(monkeypatch):
    monkeypatch.setattr(machine, "PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)  # {dtype}")
    assert machine.run_probe(torch.bfloat16, os.environ) == -signal.SIGILL


def test_a_model_in_half_precision_looks_before_its_first_product(amx, monkeypatch):
    from tests.models.common import make

    model = make("mamba2-dynamic", torch.float32)
    seen = children(monkeypatch, -signal.SIGILL, 0)
    model(torch.ones(1, 3, dtype=torch.int64))
    assert not seen
    with pytest.warns(RuntimeWarning, match=machine.ISA_VARIABLE):
        model.bfloat16()(torch.ones(1, 3, dtype=torch.int64))
    assert len(seen) == 2 and os.environ[machine.ISA_VARIABLE] == machine.ISA_WITHOUT_AMX


def test_a_model_under_autocast_looks_too(amx, monkeypatch):
    from tests.models.common import make

    seen = children(monkeypatch, 0)
    with torch.autocast("cpu", torch.bfloat16):
        make("mamba2-single", torch.float32)(torch.ones(1, 3, dtype=torch.int64))
    assert len(seen) == 1
