"""``Dataset``: a store as torch's map-style dataset, for ``torch.utils.data.DataLoader`` and what is built on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.utils.data

from nvme_ops.data.columns import Sample
from nvme_ops.data.store import SampleStore


class Dataset(torch.utils.data.Dataset[Any]):
    """Reads samples by number; a ``DataLoader`` reads a whole batch by one request.

    Workers may be forked or spawned. ``Loader`` needs none and is faster.

    Args:
        store: a ``SampleStore``, or the path of one.
        transform: is called with each sample, in the worker.
    """

    def __init__(
        self, store: SampleStore | str | os.PathLike[str], transform: Callable[[Sample], Any] | None = None
    ) -> None:
        self.store = store if isinstance(store, SampleStore) else SampleStore(store)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, number: int | list[int]) -> Any:
        """Reads a sample, or a list of them. Raises IndexError, and what ``SampleStore.read`` raises."""
        return self.__getitems__(number) if isinstance(number, list) else self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Reads a batch; torch's fetcher calls this."""
        samples = self.store.read(list(numbers))
        return samples if self.transform is None else [self.transform(sample) for sample in samples]
