"""Models, contexts and training states larger than memory, which come from files while a model computes.

model = nvme_ops.offload.from_pretrained("Llama-70B", memory_budget="16G")
model = nvme_ops.offload.stream_weights(model, "/mnt/nvme", memory_budget="4G")
model.generate(**inputs, cache=nvme_ops.offload.NvmeCache("/mnt/nvme", memory_budget="4G"))
swapped = nvme_ops.offload.swap_params(model, "/mnt/nvme", memory_budget="4G")
gradients = nvme_ops.offload.swap_gradients(model.parameters(), "/mnt/nvme")
optimizer = nvme_ops.offload.NvmeOptimizer(model.parameters(), torch.optim.AdamW, "/mnt/nvme", lr=1e-4)
with nvme_ops.offload.save_on_nvme("/mnt/nvme"): loss = model(batch)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvme_ops.base.lazy_names import attribute

if TYPE_CHECKING:
    from nvme_ops.offload.activations.save_on_nvme import save_on_nvme as save_on_nvme
    from nvme_ops.offload.activations.units import ActivationStats as ActivationStats
    from nvme_ops.offload.cache.nvme_cache import NvmeCache as NvmeCache
    from nvme_ops.offload.cache.pager import CacheStats as CacheStats
    from nvme_ops.offload.memory import Memory as Memory
    from nvme_ops.offload.optimizer.nvme_optimizer import NvmeOptimizer as NvmeOptimizer
    from nvme_ops.offload.optimizer.states import OptimizerStats as OptimizerStats
    from nvme_ops.offload.parameters.gradients import SwappedGradients as SwappedGradients
    from nvme_ops.offload.parameters.gradients import swap_gradients as swap_gradients
    from nvme_ops.offload.parameters.residents import SwapStats as SwapStats
    from nvme_ops.offload.parameters.swap import SwappedParams as SwappedParams
    from nvme_ops.offload.parameters.swap import swap_params as swap_params
    from nvme_ops.offload.residency.policy import Stats as Stats
    from nvme_ops.offload.weights.pretrained import from_pretrained as from_pretrained
    from nvme_ops.offload.weights.stream_weights import stream_weights as stream_weights
    from nvme_ops.offload.weights.window import WindowStats as WindowStats

_MODULE_OF = {
    "ActivationStats": "nvme_ops.offload.activations.units",
    "CacheStats": "nvme_ops.offload.cache.pager",
    "Memory": "nvme_ops.offload.memory",
    "NvmeCache": "nvme_ops.offload.cache.nvme_cache",
    "NvmeOptimizer": "nvme_ops.offload.optimizer.nvme_optimizer",
    "OptimizerStats": "nvme_ops.offload.optimizer.states",
    "Stats": "nvme_ops.offload.residency.policy",
    "SwapStats": "nvme_ops.offload.parameters.residents",
    "SwappedGradients": "nvme_ops.offload.parameters.gradients",
    "SwappedParams": "nvme_ops.offload.parameters.swap",
    "WindowStats": "nvme_ops.offload.weights.window",
    "from_pretrained": "nvme_ops.offload.weights.pretrained",
    "save_on_nvme": "nvme_ops.offload.activations.save_on_nvme",
    "stream_weights": "nvme_ops.offload.weights.stream_weights",
    "swap_gradients": "nvme_ops.offload.parameters.gradients",
    "swap_params": "nvme_ops.offload.parameters.swap",
}

__all__ = [*_MODULE_OF]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        try:
            return attribute(__name__, name, _MODULE_OF)
        except ImportError as error:
            if name != "NvmeCache":  # a class of transformers'
                raise
            raise ImportError("nvme_ops.offload.NvmeCache needs transformers: pip install 'transformers>=5'") from error


def __dir__() -> list[str]:
    return __all__
