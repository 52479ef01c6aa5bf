"""The jobs: sizes of samples and batches, and how long an accelerator computes on a batch, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

_MLPERF = "MLPerf Storage, github.com/mlcommons/storage, configs/dlio/workload/"

# Llama 3 8B, from llama3_8b.yaml of MLPerf Storage.
_LAYERS, _HIDDEN, _FEED_FORWARD, _HEADS, _KEY_HEADS, _VOCABULARY = 32, 4096, 14336, 32, 8, 128256
#: Parameters of a layer: query and output, key and value, three matrices of the feed-forward part, two norms.
LAYER = 2 * _HIDDEN * _HIDDEN + 2 * _HIDDEN * _HIDDEN * _KEY_HEADS // _HEADS + 3 * _HIDDEN * _FEED_FORWARD + 2 * _HIDDEN
#: Parameters of the model: the layers, both embeddings and the last norm.
MODEL = _LAYERS * LAYER + 2 * _VOCABULARY * _HIDDEN + _HIDDEN


@dataclass(frozen=True)
class Job:
    """What one accelerator asks of storage: a batch, while it computes for ``compute`` seconds.

    Args:
        record: mean bytes of a sample.
        batch: samples of a batch.
        compute: seconds for a batch.
        source: where these figures are from.
        spread: standard deviation of the bytes of a sample.
        writes: it writes a batch after each computation; else it reads batches of shuffled samples.
    """

    name: str
    words: str
    record: float
    batch: int
    compute: float
    source: str
    spread: float = 0.0
    writes: bool = False


#: The jobs by name.
JOBS = {
    job.name: job
    for job in (
        Job("unet3d", "3D segmentation", 146_600_628, 7, 0.323, _MLPERF + "unet3d_h100.yaml", 68_341_808),
        Job("resnet50", "image classification", 114_660.07, 400, 0.224, _MLPERF + "resnet50_h100.yaml"),
        Job("cosmoflow", "cosmology, 3D", 2_828_486, 1, 0.0035, _MLPERF + "cosmoflow_h100.yaml", 71_311),
        Job(
            "llm-checkpoint", "weights and optimizer states of Llama 3 8B", 14 * MODEL, 1, 5.0,
            _MLPERF + "llama3_8b.yaml: float16 weights, float32 master weights and two moments, every 5 s", writes=True,
        ),
    )
}  # fmt: skip
