"""Parses and describes the file formats that several capabilities use.

``safetensors_format`` is the header of a safetensors file, ``sharded_index`` the list of several files that belong
together, ``integrity`` the checksums in both. ``torch_zip`` is the archive of ``torch.save``, ``torch_pickle`` reads
the pickle in it, and ``contents`` describes what any of them contains.
"""

from typing import Literal, get_args

Kind = Literal["int8", "int4", "mxfp4"]  #: in which weights are packed
KINDS: tuple[str, ...] = get_args(Kind)
