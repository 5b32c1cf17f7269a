"""Times cases with whatever ``dla`` it finds: one process of `dla bench step` or of benchmarks/side_by_side.py.

Run as a script, so that it can be run with the package of another checkout, of which it uses what all versions have.
Every line of stdin is a request in JSON, answered by a line of JSON: {"threads": n} to be like a process of the lab,
then {"case": {...}} to make ready a model or an operator, then {"take": n} for n rounds, each of which gives seconds:
of a model the forward pass, the backward pass and a whole step with its optimizer, of an operator the call. With one
thread, of the lab, they are of the CPU, which do not count the time that others have it.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STREAMS = Path(__file__).parents[1] / "inspect" / "streams.py"  # this checkout's: all get the same tokens

Clock = Callable[[], float]
Take = Callable[[], list[float]]


def prepare_model(case: dict[str, Any], clock: Clock) -> Take:
    """One round of a case: a model's options, a batch, a length and the part of its tokens that has a target."""
    import torch

    from dla.models import DLAConfig, DLAForCausalLM
    from dla.training.data.feed import Micro
    from dla.training.trainer import inputs

    torch.manual_seed(0)
    # older checkouts call it a cell
    trial = import_module("dla.lab.trial" if find_spec("dla.lab.trial") else "dla.lab.cell")
    model = DLAForCausalLM(DLAConfig(**case["model"]))
    training: dict[str, Any] = {"steps": 1_000_000, "batch": case["batch"], "lr": 1e-4}
    training["gate"] = "hard" if case["model"].get("temperature") is None else "soft"
    trainer = trial.Training(**training).trainer(model)
    ids = torch.randint(0, case["model"]["vocab_size"], (case["batch"], case["length"]))
    targets = torch.where(torch.rand(ids.shape) < case["targets"], ids, -100)
    micro = Micro(ids, targets)
    given = inputs(micro, torch.device("cpu"))
    counted = int((targets != -100).sum())
    done = 0

    def take() -> list[float]:
        nonlocal done
        start = clock()
        loss = model(**given, num_items_in_batch=counted, use_cache=False).loss
        between = clock()
        loss.backward()
        end = clock()
        model.zero_grad()
        begin = clock()
        trainer.step(done, [micro])
        done += 1
        return [between - start, end - between, clock() - begin]

    model.train()
    take()
    return take


def prepare_call(case: dict[str, Any], clock: Clock) -> Take:
    """One round of a case: a memory's operator, its options, a stream's shape, and whether it trains or decodes."""
    import torch

    stream = runpy.run_path(str(STREAMS))["correlated"](0, **case["shape"])
    options = dict(case["options"])
    if options.pop("routed", False):
        options["route"] = torch.full(stream.v.shape[:3], 4.0).requires_grad_(case["train"])
    for name in ("q", "k", "v", "g", "lam"):
        getattr(stream, name).requires_grad_(case["train"])
    tokens, carried = [stream], {}
    if case["decode"]:
        tokens = [stream.cut(t, t + 1) for t in range(case["decode"])]
        carried = {"initial_state": stream.attend(case["call"], **options, output_final_state=True)[1], "inplace": True}

    def take() -> list[float]:
        start = clock()
        with torch.set_grad_enabled(case["train"]):
            for some in tokens:
                o, _ = some.attend(case["call"], **options, **carried)
        if case["train"]:
            o.sum().backward()
        return [clock() - start]

    return take


def main() -> None:
    import torch

    from dla.machine import keep_freed_memory

    take: Take = list
    clock: Clock = time.perf_counter
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = True
        if "threads" in request:
            keep_freed_memory()
            torch.set_num_threads(request["threads"])
            clock = time.process_time if request["threads"] == 1 else time.perf_counter
        if "case" in request:
            take = (prepare_model if "model" in request["case"] else prepare_call)(request["case"], clock)
            take()  # the first call loads what it needs
        if "take" in request:
            answer = [take() for _ in range(request["take"])]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
