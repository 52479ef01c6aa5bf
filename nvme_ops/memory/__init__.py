"""Memory that transfers go through or end in: ``Pool`` bounds it, ``Ring`` pipelines through it, ``carve`` divides it.

from nvme_ops.memory import Pool, Ring
pool = Pool(256 << 20)                        # at most 256 MiB
with pool.lease(8 << 20) as memory: ...       # blocks while the budget is spent
"""

from nvme_ops.memory.pool import Lease as Lease
from nvme_ops.memory.pool import Pool as Pool
from nvme_ops.memory.ring import Place as Place
from nvme_ops.memory.ring import Ring as Ring

__all__ = ["Lease", "Place", "Pool", "Ring"]


def __dir__() -> list[str]:
    return __all__
