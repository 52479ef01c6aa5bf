"""The jobs: sizes of records and batches, and how long an accelerator computes on a batch, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

_MLPERF = "MLPerf Storage, github.com/mlcommons/storage, configs/dlio/workload/"
_DLIO = "DLIO, github.com/argonne-lcf/dlio_benchmark, dlio_benchmark/configs/workload/"

# Llama 3 8B, from llama3_8b.yaml of MLPerf Storage.
_LAYERS, _HIDDEN, _FEED_FORWARD, _HEADS, _KEY_HEADS, _VOCABULARY = 32, 4096, 14336, 32, 8, 128256
#: Parameters of a layer: query and output, key and value, three matrices of the feed-forward part, two norms.
LAYER = 2 * _HIDDEN * _HIDDEN + 2 * _HIDDEN * _HIDDEN * _KEY_HEADS // _HEADS + 3 * _HIDDEN * _FEED_FORWARD + 2 * _HIDDEN
#: Parameters of the model: the layers, both embeddings and the last norm.
MODEL = _LAYERS * LAYER + 2 * _VOCABULARY * _HIDDEN + _HIDDEN
_H100 = 0.4 * 989e12  # FLOP/s: 40 % of the dense bfloat16 peak in NVIDIA's data sheet
_PROMPTS = 64 * 1024  # tokens of a prefill


@dataclass(frozen=True)
class Job:
    """What one accelerator asks of storage.

    Args:
        record: mean bytes of a sample.
        spread: standard deviation of these bytes.
        batch: samples of a batch.
        compute: seconds for a batch.
        source: where these figures are from.
        shuffled: read at random; else in order.
    """

    name: str
    words: str
    record: float
    batch: int
    compute: float
    source: str
    spread: float = 0.0
    shuffled: bool = True


#: Jobs that read.
JOBS = {
    job.name: job
    for job in (
        Job("unet3d", "3D segmentation", 146_600_628, 7, 0.323, _MLPERF + "unet3d_h100.yaml", 68_341_808),
        Job("resnet50", "image classification", 114_660.07, 400, 0.224, _MLPERF + "resnet50_h100.yaml"),
        Job("cosmoflow", "cosmology, 3D", 2_828_486, 1, 0.0035, _MLPERF + "cosmoflow_h100.yaml", 71_311),
        Job("retinanet", "object detection", 322_957, 24, 0.04755, _MLPERF + "retinanet_b200.yaml"),
        Job("bert", "language model, pretraining", 2_500, 48, 0.968, _DLIO + "bert_v100.yaml"),
        Job("dlrm", "recommendation", 512, 8192, 0.005, _MLPERF + "dlrm_h100.yaml"),
        Job(
            "zero-inference", "layers of Llama 3 8B streamed for a prefill of 64 x 1024 tokens", 2 * LAYER, 1,
            2 * LAYER * _PROMPTS / _H100, "dimensions: " + _MLPERF + "llama3_8b.yaml; 2 FLOP a parameter and token at "
            "40 % of an H100's 989 TFLOP/s", shuffled=False,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Writing:
    """A job that writes: ``nbytes`` after every ``compute`` seconds."""

    name: str
    words: str
    nbytes: int
    records: int
    compute: float
    source: str


#: Jobs that write, by name.
WRITING = {
    job.name: job
    for job in (
        Writing(
            "llm-checkpoint", "weights and optimizer states of Llama 3 8B", 14 * MODEL, 1, 5.0,
            _MLPERF + "llama3_8b.yaml: float16 weights, float32 master weights and two moments, every 5 s",
        ),
        Writing(
            "zero-infinity", "a layer of Llama 3 8B updated by AdamW: 12 bytes a parameter read and 14 written",
            26 * LAYER, 1, 6 * LAYER * _PROMPTS / _H100, "dimensions: " + _MLPERF + "llama3_8b.yaml; 6 FLOP a "
            "parameter and token, 65,536 tokens, at 40 % of an H100's 989 TFLOP/s",
        ),
        Writing(
            "inference-log", "32 results of 2 KiB logged every 10 ms", 32 * 2048, 32, 0.01,
            "no published definition: this package's own",
        ),
    )
}  # fmt: skip
