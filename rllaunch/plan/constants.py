"""Every figure of the memory plan that is not arithmetic, each with its source and the range seen.

All forecasts use the same values; none is fitted to one launch. Where sources disagree the value lies
inside their range, and `rllaunch plan --json` names the constants it used.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
GB = 10**9


@dataclass(frozen=True)
class Constant:
    """A measured figure.

    Args:
        low, high: the range seen; a forecast is as uncertain as this.
    """

    value: float
    low: float
    high: float
    unit: str
    source: str


# -- GPU, bytes ------------------------------------------------------------------------------------

TRAINER_RESIDUAL = Constant(
    2.3 * GIB,
    0.5 * GIB,
    4.0 * GIB,
    "bytes a GPU",
    "one H200, Megatron-core 0.19.2 asleep: context, library workspaces, what no region holds (own measurement, "
    "docs/accuracy.md); about 4 GB elsewhere (verl-project/verl#5979)",
)
ENGINE_RESIDUAL = Constant(
    0.85 * GIB,
    0.5 * GIB,
    2.0 * GIB,
    "bytes a GPU",
    "one H200, SGLang 0.5.17, all released (own measurement)",
)
NCCL_BUFFERS = Constant(
    1.5 * GB,
    0.5 * GB,
    2.0 * GB,
    "bytes a GPU and a parallel dimension",
    "7 to 10 GB idle with the five or six groups of a Megatron mixture of experts on 8 × H100 (verl-project/verl#6266)",
)
CUDA_GRAPHS = Constant(
    0.6 * GB, 0.01 * GB, 10 * GB, "bytes a GPU", "0.6 GB on one model, over 10 GB on others (sgl-project/sglang#7873)"
)
LOGITS_COPIES = Constant(
    2.0,
    1.0,
    3.0,
    "live copies",
    "logits in float32 and their gradient; one sample asked for 58 GiB at once in THUDM/slime#1951",
)
DELTA_RULE_BYTES = Constant(
    110.0,
    88.0,
    125.0,
    "bytes an element of a value head, of each position",
    "the most that lives at once between the projections of linear attention: 110 with three value heads a key head, "
    "114 with two, 124 with one, of which autograd keeps 88 and more (own count, on a CPU)",
)
UNFUSED_ADAM_BYTES = Constant(
    4.0,
    0.0,
    8.0,
    "bytes a parameter of a rank's shard",
    "torch's foreach AdamW while it steps: 9.7 GiB for 2.586 B parameters on one H200 (own measurement); none with a "
    "fused Adam (TransformerEngine, Apex)",
)
FP8_WEIGHT_COPY_BYTES = Constant(
    2.0,
    0.0,
    2.0,
    "bytes a matrix element",
    "TransformerEngine keeps quantised weights row-wise and column-wise while it trains in FP8 "
    "(NVIDIA/TransformerEngine transformer_engine/pytorch/module/base.py, fp8 workspaces)",
)

# -- host, bytes -----------------------------------------------------------------------------------

TRAINER_PROCESS = Constant(
    2.3 * GIB,
    1.5 * GIB,
    4 * GIB,
    "bytes a rank",
    "37.1 GiB with a backup of 34.8 on one H200 (own measurement)",
)
ENGINE_PROCESS = Constant(1.9 * GIB, 1.4 * GIB, 3 * GIB, "bytes a GPU", "SGLang 0.5.17 scheduler (own measurement)")
ENGINE_FRONT = Constant(
    2.0 * GIB,
    1.7 * GIB,
    3 * GIB,
    "bytes an engine",
    "detokenizer and the engine's actor (own measurement)",
)
NODE_BASE = Constant(1.2 * GIB, 1.0 * GIB, 4 * GIB, "bytes a node", "system and Ray, idle (own measurement)")
DISTRIBUTED_HOST = Constant(
    17 * GB,
    0.4 * GB,
    37 * GB,
    "bytes a GPU of a launch with several",
    "what is neither backup nor mirror nor one of the processes above: 157 to 182 GB with those processes on 8 × H200 "
    "(radixark/miles#3089), about 180 GB beside the trainers on 8 × H100 (THUDM/slime#1851), up to 170 GB on 4 × GB300 "
    "(radixark/miles#1572): communicators, page cache, the heap of loaders. 0.4 GB with 0.4 B parameters on 2 × H200, "
    "page cache not counted (own measurement, benchmarks/results). A small model takes less: at most "
    "`COMMUNICATORS_HOST` and the weights a rank loads, once in float32",
)
COMMUNICATORS_HOST = Constant(
    2 * GB,
    0.4 * GB,
    4 * GB,
    "bytes a GPU of a launch with several",
    "the part of `DISTRIBUTED_HOST` that does not grow with the model: 0.4 GB with 0.4 B parameters on 2 × H200 (own "
    "measurement, benchmarks/results)",
)
UPDATE_HEAP = Constant(
    0.8,
    0.0,
    1.0,
    "times a rank's parameters, where an update gathers over ranks",
    "a clone of the weights made during an update stays in the heap's arenas: about 75 GB a rank that holds 75 GB "
    "(radixark/miles#2488, docs/models/qwen/qwen3-8.md section 6.4)",
)
SAVE_BUFFER = Constant(
    1 * GIB,
    0.01 * GIB,
    14 * GIB,
    "bytes a rank",
    "torch.distributed.checkpoint copies 10 MB a thread ahead of the disk; a writer that stages the whole state takes "
    "its bytes once more (THUDM/slime#1845)",
)

# -- speed, bytes a second -------------------------------------------------------------------------

LINK_SHARE = Constant(
    0.93,
    0.87,
    1.0,
    "of a link's measured speed",
    "48 of 51.5 GiB/s, retained buffer, one H200 (own measurement)",
)
ASSUMED_LINK = Constant(
    25 * GB,
    20 * GB,
    350 * GB,
    "bytes a second",
    "taken where a profile states no link to the host, so that ways can be compared: PCIe Gen4 x16 "
    "(fzyzcjy/torch_memory_saver#111)",
)
PIN_FRESH = Constant(
    9.5 * GIB,
    6.9 * GIB,
    10.3 * GIB,
    "bytes a second",
    "offload into pages made for it: faulted in by eight threads, then locked; 7.8 and 33.7 GiB on one H200 (own "
    "measurement, benchmarks/results)",
)
UNPIN_FRESH = Constant(
    23 * GIB,
    21.7 * GIB,
    24.1 * GIB,
    "bytes a second",
    "onload from pages given back after it, one H200 (own measurement, benchmarks/results)",
)
SAVER_PIN = Constant(
    2.0 * GIB,
    1.2 * GIB,
    2.5 * GIB,
    "bytes a second",
    "torch_memory_saver's pause into pages pinned for it, one H200 (own measurement)",
)
SAVER_UNPIN = Constant(
    6.5 * GIB,
    4.1 * GIB,
    9.2 * GIB,
    "bytes a second",
    "torch_memory_saver's resume from pages freed after it, one H200 (own measurement)",
)
UPDATE_SPEED = Constant(
    27 * GIB,
    14 * GIB,
    44 * GIB,
    "bytes a second",
    "buckets over CUDA IPC, filled over the link from what was just offloaded: 24 to 27 in most cells of 2.6 B and 4 B "
    "parameters on one H200, 38 to 44 where something lies between the offload and the update, 14 to 23 with 0.6 B "
    "(own measurement, benchmarks/results); taken for several nodes too, whatever the update is read from",
)
UPDATE_SPEED_ON_GPU = Constant(
    85 * GIB,
    13 * GIB,
    86.2 * GIB,
    "bytes a second",
    "the same buckets filled from parameters on the GPU, on one node: 85 and 86 with 4 B and 5 B on one H200, 13 with "
    "0.6 B on two, where the calls are what takes the time (own measurement, benchmarks/results)",
)
CPU_ADAM_SPEED = Constant(
    60 * GB,
    20 * GB,
    200 * GB,
    "bytes a second and node",
    "an eighth to a half of a node's memory bandwidth; not measured here",
)
CPU_ADAM_TRAFFIC = Constant(
    28.0, 24.0, 32.0, "bytes a parameter", "arithmetic: masters and two moments read and written, the gradient read"
)

CONSTANTS = {name: value for name, value in globals().items() if isinstance(value, Constant)}
