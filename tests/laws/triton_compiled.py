"""Compiles every Triton kernel for two GPUs, which need not be there; not in the interpreter.

Fails where a kernel whose sums are compared with a twin's fuses multiplication and addition.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from murmurate.losses import _triton_q
from murmurate.replay import _triton_frames
from murmurate.replay import _triton_tree as tree

TYPES = {
    **dict.fromkeys(("mass", "sums"), "*fp64"),
    **dict.fromkeys(("leaves", "weights", "lows", "lows_below", "priority"), "*fp32"),
    **dict.fromkeys(("starts", "out", "indices", "index", "owner", "wrong", "a_tm1"), "*i64"),
    **dict.fromkeys(("q_tm1", "r_t", "discount_t", "weight", "q_t", "q_t_selector"), "*fp32"),
    **dict.fromkeys(("error", "loss", "gradient"), "*fp32"),
    **dict.fromkeys(("count", "capacity", "leaves_each", "actions"), "i32"),
    **dict.fromkeys(("key", "first", "ticket"), "i64"),
    "beta": "fp32",
    "frames": "*u8",
    "frame_bytes": "i32",
    "window_bytes": "i32",
}
SEARCH = {"LEVELS": 4, "FAN_OUT": 16, "BLOCK": 64}
CASES = [
    (tree._find, SEARCH, {}),
    (tree._sample, {**SEARCH, "STRATIFIED": False}, {}),
    (tree._sample, {**SEARCH, "STRATIFIED": True, "LEVELS": 0}, {}),
    (tree._elect, {"BLOCK": 64}, {}),
    (tree._write, {"BLOCK": 64}, {}),
    *(
        (tree._refresh, {"ALL": all_, "LEAVES": leaves, "FAN_OUT": 16, "BLOCK": 64}, {"below": below})
        for all_ in (False, True)
        for leaves, below in ((True, "*fp32"), (False, "*fp64"))
    ),
    (_triton_frames._gather, {"BLOCK": 4096}, {"out": "*u8", "first": "*i64"}),
    (_triton_q._step, {"WIDTH": 8, "BLOCK": 16}, {}),
]

for capability in (80, 90):
    for kernel, constants, more in CASES:
        types = {**TYPES, **more, **dict.fromkeys(constants, "constexpr")}
        signature = {name: types[name] for name in kernel.arg_names}
        values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        target = GPUTarget("cuda", capability, 32)
        made = triton.compile(
            ASTSource(kernel, signature, values), target=target, options={"enable_fp_fusion": False}
        )
        fused = "fma.rn.f32" if kernel is _triton_q._step else "fma.rn.f64"
        assert fused not in made.asm["ptx"], kernel.__name__
        if kernel is _triton_q._step:  # these replace NaN by the other operand
            assert not {"min.f32", "max.f32"} & set(made.asm["ptx"].split()), kernel.__name__
        print(kernel.__name__, capability, len(made.asm["cubin"]))
