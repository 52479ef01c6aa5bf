"""The table of ops: a builder added here is known to the report, ``setup.py`` and the tests."""

from __future__ import annotations

from .async_io import AsyncIOBuilder
from .builder import OpBuilder
from .gds import GDSBuilder

#: Op name -> its builder, for every op that is compiled.
ALL_OPS: dict[str, OpBuilder] = {builder.NAME: builder for builder in (AsyncIOBuilder(), GDSBuilder())}
