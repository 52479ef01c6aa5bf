"""What the formats of several capabilities have in common.

``safetensors_format`` is the header of a safetensors file, ``sharded_index`` the list of several files that belong
together, ``integrity`` the checksums in both. ``torch_zip`` is the container of ``torch.save``,
``torch_pickle`` reads the pickle in it, and ``contents`` is how any of them tells what it holds.
"""
