"""The data planes by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Literal, get_args

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.ids import Identity
from kvhandoff.transport.api import DataPlane
from kvhandoff.transport.lanes import LanedPlane
from kvhandoff.transport.nixl import NixlPlane
from kvhandoff.transport.nixl_agent import BACKENDS, Backend
from kvhandoff.transport.region import PrivateRegion, SharedRegion
from kvhandoff.transport.shm import SharedMemoryPlane

PlaneKind = Literal["nixl", "shm"]
PLANE_KINDS: tuple[PlaneKind, ...] = get_args(PlaneKind)

NIXL_LANES = 2
"""Measured: 1024 scattered blocks of 369 KB on one host take 32 to 37 ms on one lane, 25 to 28 on two."""


MAX_LANES = 16


@dataclass(frozen=True)
class PlaneOptions:
    """How a NIXL plane is set up. LIBFABRIC (for EFA) is untested."""

    backend: Backend = "UCX"
    lanes: int = NIXL_LANES
    options: Mapping[str, str] = field(default_factory=dict)
    """The backend's own parameters, by NIXL's names; they come before those that kvhandoff sets."""

    def __post_init__(self) -> None:
        """Raises ConfigError for values that can't be."""
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend: got {self.backend!r}, allowed is {' or '.join(BACKENDS)}")
        if not 1 <= self.lanes <= MAX_LANES:
            raise ConfigError(f"lanes: got {self.lanes}, allowed is 1 to {MAX_LANES}")
        for name, value in self.options.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ConfigError(f"options: got {name!r}: {value!r}, allowed are strings")
            if name == "num_threads":
                raise ConfigError(
                    "options: num_threads is not allowed, since NIXL then reports the error of one thread "
                    "while others still move bytes; use lanes"
                )


DEFAULT_OPTIONS = PlaneOptions()


def default_kind() -> PlaneKind:
    """`nixl` where it is installed, else `shm`."""
    return "nixl" if find_spec("nixl_cu12") else "shm"


def create_plane(kind: str, me: Identity) -> DataPlane:
    """A data plane of that kind; call it on the thread that will own it. Raises ConfigError."""
    if kind == "nixl":
        return nixl_plane(str(me))
    if kind == "shm":
        return SharedMemoryPlane()
    raise _unknown(kind)


def nixl_plane(name: str, options: PlaneOptions = DEFAULT_OPTIONS) -> LanedPlane:
    """A NIXL plane under a name that no other ever has; call it on the thread that will own it.

    Raises ConfigError if NIXL is not installed or the backend can't be started.
    """
    make_lane = partial(NixlPlane, name, backend=options.backend, options=options.options)
    return LanedPlane(make_lane, options.lanes)


def allocate_region(kind: str, num_blocks: int, block_bytes: int) -> SharedRegion | PrivateRegion:
    """The memory that suits a data plane of that kind. Raises ConfigError."""
    if kind == "nixl":
        return PrivateRegion.allocate(num_blocks, block_bytes)
    if kind == "shm":
        return SharedRegion.allocate(num_blocks, block_bytes)
    raise _unknown(kind)


def _unknown(kind: str) -> ConfigError:
    return ConfigError(f"transport: got {kind!r}, allowed is {' or '.join(PLANE_KINDS)}")
