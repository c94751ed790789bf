"""The model on the paged pool: sequences' new tokens in, their KV into the pool's blocks, logits out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.layout import KVLayout
from kvhandoff.embedded import exact as exact_mode
from kvhandoff.embedded import selfcheck
from kvhandoff.embedded.api import SequenceStep
from kvhandoff.embedded.attention import ATTENTION_NAME, PLAN_KWARG, PagedPool
from kvhandoff.embedded.batch import pack
from kvhandoff.embedded.linear import pack_linear_layers
from kvhandoff.engine.fingerprint import model_fingerprint
from kvhandoff.transport.api import HeadRange, HostRegion, MemoryKind
from kvhandoff.transport.pieces import side_by_side
from kvhandoff.transport.region import checked_size

LAYOUT_ORDER = "block,layer,token,2,head,dim"
DEFAULT_KV_BYTES = 1 << 30
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

RegionFactory = Callable[[int, int], HostRegion]
"""(num_blocks, block_bytes) → memory for the pool."""


class TensorRegion:
    """A region that is a tensor: scratch memory of the self-checks, and the pool on a CUDA device."""

    heads: HeadRange | None = None

    def __init__(self, num_blocks: int, block_bytes: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.tensor = torch.zeros(num_blocks * block_bytes, dtype=torch.uint8, device=device)
        self.pieces = (side_by_side(self.address, block_bytes),)
        self.ranges = ((self.address, num_blocks * block_bytes),)
        self.memory = MemoryKind.DRAM if device.type == "cpu" else MemoryKind.VRAM
        self.device = self.tensor.device.index or 0

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def buffer(self) -> memoryview:
        """Raises ConfigError for device memory, which the host has no view of."""
        if self.tensor.device.type != "cpu":
            raise ConfigError(f"transport: a pool on {self.tensor.device} has no host memory to share")
        return memoryview(self.tensor.numpy())  # type: ignore[arg-type]


class TorchRunner:
    """Implements `api.ModelRunner`; made by `load_runner`. Used by one thread at a time."""

    def __init__(
        self, model: Any, layout: KVLayout, region: HostRegion, *, exact: bool, fingerprint: str
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        self.layout = layout
        self.region = region
        """The pool's memory, to be registered with a data plane."""
        self.model_fingerprint = fingerprint
        self.vocab_size: int = config.vocab_size
        self.max_context: int = config.max_position_embeddings
        self.eos_token_ids = _eos_token_ids(model)
        self.windows: dict[int, int | None] = {}
        """Sliding window that each layer asked for in the last step."""
        self._model = model
        self._exact = exact
        self._pool = PagedPool(_pool_tensor(layout, region))

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor | None]:
        """Write the new tokens' KV into their blocks; per step the wanted logits as a float32 tensor
        `[rows, vocab_size]` (1 row for `last`), or None.

        Raises ValueError for a step without tokens or with too few blocks, before anything is written.
        """
        with torch.inference_mode():
            batch = pack(steps, self._pool, exact=self._exact)
            output = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.kept,
                **{PLAN_KWARG: batch.plan},
            )
        self.windows = batch.plan.windows
        # A copy made outside inference mode: a sampler may change it in place.
        logits = output.logits[0].to(torch.float32, copy=True)
        return [None if rows is None else logits[rows] for rows in batch.wanted]


def load_runner(
    model_dir: Path,
    *,
    dtype: str = "auto",
    exact: bool = False,
    block_size: int = 16,
    device: str = "cpu",
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    region_factory: RegionFactory,
) -> TorchRunner:
    """Load the model of `model_dir`, check it against a plain forward, and put it on a pool.

    `dtype`: `float32`, `bfloat16`, `float16`, or `auto`: the checkpoint's own, float32 in exact mode. The
    pool has `num_blocks` blocks of `block_size` tokens, or as many as fit `kv_bytes` (default 1 GiB).
    `region_factory` makes the pool's memory. `exact`: see `embedded/exact.py`, whose `prepare_environment`
    has to be called before torch is loaded.

    `device="cuda"` is untested: the pool then is device memory that `region_factory` isn't asked for.

    Raises ConfigError for a model that can't be loaded or would be served wrongly, for settings that don't
    fit it, and in exact mode where exactness doesn't hold.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    target = _device(device)
    if target.type == "cpu":
        _ask_for_amx()
    elif not torch.cuda.is_available():
        raise ConfigError(f"device: got {device!r}, but torch finds no CUDA device; allowed is 'cpu'")
    elif exact:
        raise ConfigError("exact mode: holds on the device 'cpu' only")
    if block_size < 1 or (exact and exact_mode.KV_MULTIPLE % block_size):
        allowed = f"a divisor of {exact_mode.KV_MULTIPLE} in exact mode" if exact else "1 or more"
        raise ConfigError(f"block-size: got {block_size}, allowed is {allowed}")

    config = _load_config(model_dir)
    selfcheck.check_config(config)
    context: int = config.get_text_config(decoder=True).max_position_embeddings
    if block_size > context:  # no prompt would fill a block, so that none would be handed over
        raise ConfigError(
            f"block-size: got {block_size}, allowed is up to the model's context, {context} tokens"
        )
    torch_dtype = _resolve_dtype(dtype, config, exact=exact)
    layout = _layout(config, torch_dtype, block_size)
    blocks = _num_blocks(layout, num_blocks, kv_bytes)
    if target.type == "cpu":
        checked_size(blocks, layout.block_bytes)  # before the weights are read, which takes long

    model = _load_model(model_dir, torch_dtype).to(target)
    probe = selfcheck.Probe.of(model)
    model.set_attn_implementation(ATTENTION_NAME)
    if not exact:
        pack_linear_layers(model)
    fingerprint = model_fingerprint(model_dir, layout.dtype, f"exact={exact}")

    def runner_on(region: HostRegion) -> TorchRunner:
        return TorchRunner(model, layout, region, exact=exact, fingerprint=fingerprint)

    scratch = TensorRegion(selfcheck.blocks_needed(block_size), layout.block_bytes, target)
    probe.check(runner_on(scratch))
    if exact:
        scratch = TensorRegion(exact_mode.blocks_needed(block_size), layout.block_bytes, target)
        exact_mode.prove(runner_on(scratch))
    if target.type == "cpu":
        return runner_on(region_factory(blocks, layout.block_bytes))
    return runner_on(TensorRegion(blocks, layout.block_bytes, target))


def _device(name: str) -> torch.device:
    """The device, by torch's name. Raises ConfigError for a kind that isn't supported."""
    refused = ConfigError(f"device: got {name!r}, allowed is cpu, cuda")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise refused from error
    if device.type not in ("cpu", "cuda"):
        raise refused
    return device


def _ask_for_amx() -> None:
    """Ask the kernel for AMX, which torch does at its first large product only: if the first forward is a
    one-token step, the process dies of an illegal instruction."""
    init = getattr(getattr(torch._C, "_cpu", None), "_init_amx", None)
    if init is not None:
        init()


_LOAD_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)
"""What transformers raises for a directory that it can't make a model of."""


def _load_config(model_dir: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except _LOAD_ERRORS as error:
        raise ConfigError(f"model: {model_dir}/config.json can't be used: {error}") from error


def _load_model(model_dir: Path, dtype: torch.dtype) -> Any:
    loader: Any = AutoModelForCausalLM
    try:
        model, info = loader.from_pretrained(
            model_dir, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except _LOAD_ERRORS as error:
        raise ConfigError(f"model: {model_dir} can't be loaded: {error}") from error
    # transformers fills these with random numbers and a warning.
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:
        raise ConfigError(
            f"model: the weights in {model_dir} lack {len(absent)} tensors or have them in another shape: "
            f"{', '.join(absent[:3])}{', …' if len(absent) > 3 else ''}"
        )
    model.eval().requires_grad_(False)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise selfcheck.refused(model.config, "its forward has no logits_to_keep")
    return model


def _resolve_dtype(dtype: str, config: Any, *, exact: bool) -> torch.dtype:
    if dtype == "auto":
        own = exact_mode.DEFAULT_DTYPE if exact else str(config.dtype).removeprefix("torch.")
        dtype = own if own in _DTYPES else "float32"
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype: got {dtype!r}, allowed is auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _layout(config: Any, dtype: torch.dtype, block_size: int) -> KVLayout:
    text = config.get_text_config(decoder=True)
    try:
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    except RuntimeError as error:  # transformers: the value differs between layers
        raise selfcheck.refused(config, f"its layers are of several shapes: {error}") from error
    return KVLayout(
        order=LAYOUT_ORDER,
        dtype=str(dtype).removeprefix("torch."),
        layers=text.num_hidden_layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        block_bytes=text.num_hidden_layers * block_size * 2 * kv_heads * head_dim * dtype.itemsize,
    )


def _num_blocks(layout: KVLayout, num_blocks: int | None, kv_bytes: int | None) -> int:
    if num_blocks is not None and kv_bytes is not None:
        raise ConfigError("num_blocks and kv_bytes: give one of them")
    if num_blocks is not None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks: got {num_blocks}, allowed is 1 or more")
        return num_blocks
    size = DEFAULT_KV_BYTES if kv_bytes is None else kv_bytes
    if size < layout.block_bytes:
        raise ConfigError(
            f"kv-memory, block-size: got {size / 2**30:.3g} GiB and blocks of {layout.block_size} tokens, "
            f"allowed is {_gib_above(layout.block_bytes)} GiB or more (one such block of this model), "
            "or smaller blocks"
        )
    return size // layout.block_bytes


def _gib_above(size: int) -> str:
    """Bytes in GiB, rounded up to thousandths."""
    return f"{math.ceil(size / 2**30 * 1000) / 1000:g}"


def _pool_tensor(layout: KVLayout, region: HostRegion) -> torch.Tensor:
    """`[num_blocks, layers, block_size, 2, kv_heads, head_dim]` on the region's memory."""
    if region.block_bytes != layout.block_bytes:
        raise ValueError(f"a region of {region.block_bytes}-byte blocks for blocks of {layout.block_bytes}")
    shape = (region.num_blocks, layout.layers, layout.block_size, 2, layout.kv_heads, layout.head_dim)
    raw = (
        region.tensor
        if isinstance(region, TensorRegion)
        else torch.frombuffer(region.buffer, dtype=torch.uint8)
    )
    dtype = _DTYPES[layout.dtype]
    return raw[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _eos_token_ids(model: Any) -> frozenset[int]:
    """From the generation config, which for chat models names the end of a turn too, else from the config."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
