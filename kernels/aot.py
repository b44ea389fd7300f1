"""Compile every Triton kernel for GPUs that need not be here, and say what each costs there.

    python -P -m evenload.kernels.aot                        # sm_80, sm_90, sm_100, gfx942
    python -P -m evenload.kernels.aot --targets sm_90 --cases router

The cases are calls of the functions that launch kernels, on small CPU tensors, with the launch itself replaced by a note
of the kernel and its arguments: what is compiled is what would be launched. Exit status 1 if a kernel spills registers, or if
a kernel has no case.

Shape suffixes: T tokens, E experts, K experts per token, R rows, D model.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import histogram_triton, permutation_triton, router_triton

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MODULES = (router_triton, histogram_triton, permutation_triton)


@dataclass(frozen=True)
class Launch:
    """A kernel as a host function would launch it: types of the arguments, values of the constants, options."""

    kernel: str
    module: int
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]
    options: dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """What one kernel costs on one target. `registers` are per thread; `spills` and `shared` are in bytes."""

    case: str
    kernel: str
    target: str
    registers: int
    spills: int
    shared: int
    seconds: float


def cases() -> dict[str, Callable[[], Any]]:
    """Calls that between them launch every kernel, at the sizes that models have."""
    slots_R = torch.arange(32)
    low, high, mask_T = torch.tensor(-1.0), torch.tensor(1.0), torch.ones(16, dtype=torch.bool)

    def forward(
        E: int, k: int, *options: Any, dtype: torch.dtype = torch.float32, bias: bool = True, masked: bool = False
    ) -> Callable[[], Any]:
        logits_TE, bias_E, mask = torch.zeros(16, E, dtype=dtype), torch.zeros(E) if bias else None, mask_T if masked else None
        return lambda: router_triton.router_forward(logits_TE, bias_E, mask, k, *options)

    def backward(E: int, k: int, score: str, normalize: bool, parts: int) -> Callable[[], Any]:
        of_weights = torch.zeros(16, k)
        of_scores = torch.zeros(16, E) if parts > 1 else None
        of_clean = torch.zeros(16, E) if parts > 2 else None
        scores_TE, indices_TK = torch.zeros(16, E), torch.zeros(16, k, dtype=torch.int64)
        mask = mask_T if parts > 1 else None
        rest = scores_TE, indices_TK, mask, mask_T, score, normalize, 2.5, torch.bfloat16
        return lambda: router_triton.router_backward(of_weights, of_scores, of_clean, *rest)

    wide_TE, x_TD = torch.zeros(16, 64), torch.zeros(16, 1024, dtype=torch.bfloat16)
    indices_TK, weights_TK = torch.zeros(16, 2, dtype=torch.int64), torch.zeros(16, 2)
    rows_RD, values_TE = torch.zeros(32, 1024, dtype=torch.bfloat16), wide_TE.bfloat16()
    return {
        "router E=64 K=8": forward(64, 8, "sigmoid", "logits", False, 1.0, 0, 0, False),
        "router E=60 K=4 softmax": forward(60, 4, "softmax", "scores", True, 1.0, 0, 0, True, masked=True, bias=False),
        "router E=256 K=8 groups": forward(
            256, 8, "sigmoid", "scores", True, 2.5, 8, 4, True, dtype=torch.bfloat16, masked=True
        ),
        "router E=256 K=8": forward(256, 8, "sigmoid", "logits", True, 1.0, 0, 0, False),
        "router E=1024 K=32": forward(1024, 32, "softmax", "logits", True, 1.0, 0, 0, False),
        "gradient E=64 K=8": backward(64, 8, "sigmoid", False, 1),
        "gradient E=256 K=8": backward(256, 8, "sigmoid", True, 3),
        "gradient E=1024 K=32": backward(1024, 32, "softmax", True, 2),
        "margins": lambda: histogram_triton.margin_bytes(wide_TE, torch.zeros(16), None, None),
        "margins, mask, groups": lambda: histogram_triton.margin_bytes(wide_TE, torch.zeros(16), wide_TE > 0, mask_T),
        "high bytes": lambda: histogram_triton.byte_histogram(values_TE, None),
        "low bytes": lambda: histogram_triton.byte_histogram(values_TE, torch.zeros(64, dtype=torch.int64)),
        "1000 bins": lambda: histogram_triton.uniform_histogram(wide_TE, low, high, 1000, mask_T),
        "2048 bins": lambda: histogram_triton.uniform_histogram(wide_TE, low, high, 2048, None),
        "order E=64": lambda: permutation_triton.expert_order(indices_TK, 64, mask_T),
        "order E=1024": lambda: permutation_triton.expert_order(indices_TK, 1024, None),
        "permute D=1024": lambda: permutation_triton.take_tokens(x_TD, slots_R, 2),
        "unpermute D=1024": lambda: permutation_triton.sum_slots(rows_RD, slots_R, weights_TK, 16, 2),
        "gradient of permute": lambda: permutation_triton.sum_slots(rows_RD, slots_R, None, 16, 2),
        "gradient of unpermute": lambda: permutation_triton.sum_slots_backward(x_TD, rows_RD, slots_R, weights_TK),
    }


def kernels() -> dict[str, int]:
    """{name of a kernel: its module}."""
    return {name: i for i, module in enumerate(MODULES) for name in vars(module) if name.endswith("_kernel")}


def launches(chosen: dict[str, Callable[[], Any]]) -> list[tuple[str, Launch]]:
    """(case, launch) of every launch that these calls make; nothing is run on a device."""
    found = []
    for case, call in chosen.items():
        with _noted() as noted:
            call()
        found += [(case, launch) for launch in noted]
    return found


@contextmanager
def _noted() -> Iterator[list[Launch]]:
    noted: list[Launch] = []
    originals = {(module, name): getattr(MODULES[module], name) for name, module in kernels().items()}
    for (module, name), kernel in originals.items():
        setattr(MODULES[module], name, _Note(name, module, kernel, noted))
    try:
        yield noted
    finally:
        for (module, name), kernel in originals.items():
            setattr(MODULES[module], name, kernel)


class _Note:
    """In a kernel's place: `kernel[grid](...)` is noted."""

    def __init__(self, name: str, module: int, kernel: Any, noted: list[Launch]) -> None:
        self.name, self.module, self.kernel, self.noted = name, module, kernel, noted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._note

    def _note(self, *args: Any, **options: Any) -> None:
        names, constexpr = self.kernel.arg_names, {self.kernel.arg_names[i] for i in self.kernel.constexprs}
        given = dict(zip(names, args, strict=False)) | {name: options.pop(name) for name in names if name in options}
        signature, constants, attributes = {}, {}, {}
        for place, name in enumerate(names):
            value = given[name]
            if name in constexpr:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[name] = _POINTERS[value.dtype]
                attributes[place,] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
        self.noted.append(Launch(self.name, self.module, signature, constants, attributes, options))


_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


def compile_one(case: str, launch: Launch, target: str) -> Cost:
    """Compile without the cache."""
    kernel = getattr(MODULES[launch.module], launch.kernel)
    source = ASTSource(kernel, launch.signature, launch.constants, launch.attributes)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        compiled = triton.compile(source, target=TARGETS[target], options=launch.options)
        seconds = time.perf_counter() - start
        registers, spills = _of_amd(compiled.asm) if "amdgcn" in compiled.asm else _of_nvidia(compiled.asm["cubin"], folder)
    return Cost(case, launch.kernel, target, registers, spills, compiled.metadata.shared, seconds)


def _of_nvidia(cubin: bytes, folder: str) -> tuple[int, int]:
    path = Path(folder) / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", path], check=True, capture_output=True, text=True).stdout
    number = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return number["REG"], number["STACK"] + number["LOCAL"]


def _of_amd(asm: dict[str, Any]) -> tuple[int, int]:
    number = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)", asm["amdgcn"])}
    spilled = 4 * (number["vgpr_spill_count"] + number["sgpr_spill_count"])
    return number["vgpr_count"], spilled + number["private_segment_fixed_size"]


def compile_all(targets: list[str], wanted: str = "") -> Iterator[Cost]:
    """Costs of the cases whose names contain `wanted`, as they become known; one process per core."""
    chosen = {name: call for name, call in cases().items() if wanted in name}
    # The slow ones first, so that no core idles at the end.
    jobs = sorted(
        ((case, launch, target) for case, launch in launches(chosen) for target in targets),
        key=lambda job: -job[1].constants.get("K", 0) * job[1].constants.get("E", 0),
    )
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_one, *job) for job in jobs]):
            yield done.result()


def table(costs: list[Cost]) -> str:
    """One line per kernel, case and target."""
    order = [*cases()]
    lines = [f"{'case':<26}{'kernel':<28}{'target':<8}{'registers':>9}{'spills':>8}{'shared':>8}{'seconds':>9}"]
    for cost in sorted(costs, key=lambda cost: (order.index(cost.case), cost.kernel, [*TARGETS].index(cost.target))):
        lines.append(
            f"{cost.case:<26}{cost.kernel:<28}{cost.target:<8}"
            f"{cost.registers:>9}{cost.spills:>8}{cost.shared:>8}{cost.seconds:>9.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--cases", default="", help="only those whose name contains this")
    parser.add_argument("--json", type=Path, help="write the table there, too")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 replaces the compiler; unset it")
    start = time.perf_counter()
    costs = list(compile_all(arguments.targets, arguments.cases))
    print(table(costs))
    seconds = time.perf_counter() - start
    print(f"{len(costs)} kernels compiled in {seconds:.0f} s on {os.cpu_count()} cores, triton {triton.__version__}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")
    missing = set(kernels()) - {cost.kernel for cost in costs} if not arguments.cases else set()
    spilling = [cost for cost in costs if cost.spills]
    if missing:
        sys.exit(f"no case launches {', '.join(sorted(missing))}; add one to `cases`")
    if spilling:
        sys.exit("registers spill in " + ", ".join(f"{cost.kernel} ({cost.case}, {cost.target})" for cost in spilling))


if __name__ == "__main__":
    main()
