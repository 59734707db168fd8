# SPDX-License-Identifier: Apache-2.0
"""The one file that knows vLLM versions: which hooks there are, and where facts are kept.

Everything else asks :class:`EngineFacts`, which is read once from vLLM's
configuration, or :class:`RankFacts`, read in a worker process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from ec_connector.config import Settings
from ec_connector.dtypes import lookup
from ec_connector.engine.checkpoint import weights_digest
from ec_connector.engine.weights import Weights
from ec_connector.errors import ConfigError
from ec_connector.protocol.fingerprint import (
    Identity,
    compute_ec_compatibility_hash,
    short_digest,
)

logger = logging.getLogger("vllm.ec_connector.compat")

DEFAULT_EC_PORT: Final = 14579
"""vLLM's own default for ``ec_port``: the operator set none."""

NEEDED_HOOKS: Final = (
    "build_connector_meta",
    "build_connector_worker_meta",
    "ensure_cache_available",
    "get_ec_connector_stats",
    "get_finished",
    "has_cache_item",
    "has_pending_push_work",
    "request_finished",
    "save_caches",
    "shutdown",
    "start_load_caches",
    "start_save_caches",
    "take_unavailable_requests",
    "update_connector_output",
    "update_state_after_alloc",
)
"""Hooks of vLLM's ``ECConnectorBase`` without which the failure contract cannot be kept."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the scheduler side needs to know of its engine.

    Attributes:
        dtype: the model's, without ``torch.``.
        widths: columns of an encoder output by modality, where measured.
        possible_widths: columns that this model's encoder could have, where not.
        always_delivers: every step's metadata reaches the workers, also of a
            step without tokens.
    """

    settings: Settings
    identity: Identity
    is_producer: bool
    is_consumer: bool
    dtype: str
    widths: Mapping[str, int] = field(default_factory=dict)
    possible_widths: frozenset[int] = frozenset()
    always_delivers: bool = False
    engine_id: str = ""

    @property
    def serves(self) -> tuple[str, ...]:
        """What a router may ask of this engine."""
        return ("encode",) * self.is_producer + ("decode",) * self.is_consumer


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a worker needs to know of itself. ``leads``: it saves, and speaks for the others."""

    is_producer: bool
    leads: bool
    dtype: str


def require_hooks(base: type) -> None:
    """Refuse a vLLM whose connector base class lacks hooks that we rely on.

    Raises:
        ConfigError: names what is missing and what to install.
    """
    missing = [name for name in NEEDED_HOOKS if not hasattr(base, name)]
    if missing:
        raise ConfigError(
            f"this vLLM ({vllm_version()}) does not call {', '.join(missing)} of an encoder-cache "
            f"connector; install vllm>=0.32"
        )


def vllm_version() -> str:
    """The installed vLLM's version."""
    from vllm.version import __version__

    return str(__version__)


def engine_facts(vllm_config: Any) -> EngineFacts:
    """Read and check what the scheduler side needs.

    Raises:
        ConfigError: a setting is wrong, or this engine's shape is not supported.
    """
    transfer = vllm_config.ec_transfer_config
    _refuse_unsupported(vllm_config)
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    widths = dict(getattr(transfer, "mm_encoder_output_widths", None) or {})
    return EngineFacts(
        settings=_settings(vllm_config),
        identity=_identity(vllm_config, widths),
        is_producer=bool(transfer.is_ec_producer),
        is_consumer=bool(transfer.is_ec_consumer),
        dtype=dtype,
        widths=widths,
        possible_widths=_possible_widths(vllm_config),
        always_delivers=not transfer.is_ec_consumer,
        engine_id=f"{transfer.engine_id}_dp{vllm_config.parallel_config.data_parallel_index}",
    )


def rank_facts(vllm_config: Any) -> RankFacts:
    """What this worker process is; call it once vLLM's process groups exist."""
    from vllm.distributed.parallel_state import (
        get_pcp_group,
        get_pp_group,
        get_tensor_model_parallel_rank,
    )

    leads = (
        get_tensor_model_parallel_rank() == 0
        and get_pcp_group().rank_in_group == 0
        and get_pp_group().is_first_rank
    )
    return RankFacts(
        is_producer=bool(vllm_config.ec_transfer_config.is_ec_producer),
        leads=bool(leads),
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
    )


def worker_device() -> str:
    """The device this worker's tensors are on, as torch names it."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    if current_platform.is_cuda_alike():
        return f"{kind}:{current_platform.current_device()}"
    return kind


def waiting_allowed() -> Any:
    """A context in which vLLM's checks accept that the host waits for the device."""
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed

    return gpu_sync_allowed()


class ItemFields:
    """Which keys of an item's data only describe its placeholder, and are not its media."""

    def __init__(self, model_config: Any) -> None:
        from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

        self._resolver = PlaceholderMetadataResolver(model_config)

    def has_media(self, feature: Any) -> bool:
        """Whether this engine could encode the item itself."""
        data = feature.data
        if not data:
            return False
        described = self._resolver.fields_for(feature.modality)
        return any(
            element.data is not None for key, element in data.items() if key not in described
        )

    def announcements(self, features: Any) -> dict[str, dict[str, Any]]:
        """vLLM's entry for each item: ``item_indices`` and ``metadata``."""
        from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata

        return dict(collect_ec_item_metadata(features, self._resolver))


# ── inside ───────────────────────────────────────────────────────────────────


def _settings(vllm_config: Any) -> Settings:
    transfer = vllm_config.ec_transfer_config
    settings = Settings.parse(transfer.ec_connector_extra_config or {})
    set_port = transfer.ec_port if transfer.ec_port != DEFAULT_EC_PORT else 0
    if settings.port and set_port and settings.port != set_port:
        raise ConfigError(
            f"ec_port={set_port} and port={settings.port} (ec_connector_extra_config) differ; "
            f"give only one of them"
        )
    port = settings.port or set_port
    if port and transfer.is_ec_producer:
        port += vllm_config.parallel_config.data_parallel_index
        if port > 65535:
            raise ConfigError(
                f"port {port} (the port that was set, plus the data-parallel index) is above "
                f"65535; set a smaller ec_port"
            )
    else:
        port = 0  # nobody asks a consumer, and two engines of one host may share their flags
    return replace(settings, bind_host=settings.bind_host or str(transfer.ec_ip), port=port)


def _refuse_unsupported(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        raise ConfigError(
            f"this engine's ranks are spread over {parallel.nnodes_within_dp} nodes, but they "
            f"share the pool's memory and must be on one; run one engine per node "
            f"(data parallelism) instead of tensor or pipeline parallelism across nodes"
        )
    lora = getattr(vllm_config, "lora_config", None)
    if lora is not None and getattr(lora, "enable_tower_connector_lora", False):
        raise ConfigError(
            "enable_tower_connector_lora makes encoder outputs depend on an adapter that is "
            "known by name only, so a reloaded one would be served stale; turn it off"
        )
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None:
        raise ConfigError(
            f"model {vllm_config.model_config.model!r} takes no images, audio or video, so there "
            f"are no encoder outputs to transfer; remove --ec-transfer-config"
        )
    cached = vllm_config.cache_config.enable_prefix_caching
    if multimodal.mm_processor_cache_gb == 0 and not cached:
        logger.warning(
            "The processor cache (mm_processor_cache_gb=0) and prefix caching are both off, so "
            "vLLM does not hash media: items without a uuid of the client's are neither "
            "announced nor fetched. Leave mm_processor_cache_gb at its default."
        )


def _identity(vllm_config: Any, widths: Mapping[str, int]) -> Identity:
    model = vllm_config.model_config
    version, name, dtype = vllm_version(), str(model.model), str(model.dtype)
    row_bytes = _hidden(model) * lookup(dtype).itemsize
    factors: dict[str, object] = {
        "vllm_version": version,
        "model": name,
        "dtype": dtype,
        "row_bytes": str(row_bytes),
        "revision": model.revision,
        "quantization": str(model.quantization) if model.quantization else "none",
        "hf_overrides": model.hf_overrides if isinstance(model.hf_overrides, dict) else None,
        "weights": _weights(vllm_config),
        **{f"width_{modality}": str(width) for modality, width in sorted(widths.items())},
        **_processor_factors(model.multimodal_config),
    }
    known = {}
    for key, value in factors.items():
        try:
            known[key] = "" if value is None else short_digest(value)
        except TypeError:
            logger.info("%s is not plain JSON data and is not compared with peers", key)
    return Identity(
        compatibility_hash=compute_ec_compatibility_hash(version, name, dtype, row_bytes),
        factors={key: value for key, value in known.items() if value},
    )


def _processor_factors(multimodal: Any) -> dict[str, object]:
    """Options that change an item's bytes or rows although its identifier stays."""
    pruning = getattr(multimodal, "video_pruning_rate", None)
    return {
        "mm_processor_kwargs": multimodal.mm_processor_kwargs or {},
        "media_io_kwargs": multimodal.media_io_kwargs or {},
        "encoder_attention_dtype": str(getattr(multimodal, "mm_encoder_attn_dtype", None)),
        "video_pruning": f"{pruning} {getattr(multimodal, 'video_pruning_method', '')}"
        if pruning
        else "none",
    }


def _weights(vllm_config: Any, source: str = "") -> str | None:
    """The digest of the weights at ``source``, else of this configuration's; None: not known."""
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    if load_format == "dummy":
        return "dummy"
    model = vllm_config.model_config
    name = source or str(getattr(model, "model_weights", "") or model.model)
    try:
        folder = Path(name)
        if not folder.is_dir():
            from huggingface_hub import (  # type: ignore[import-not-found, unused-ignore]
                snapshot_download,
            )

            revision = None if source else model.revision
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        return weights_digest(folder)
    except Exception as error:  # whatever a hub client raises: the factor is then unknown
        logger.warning(
            "The weights of %s cannot be read (%s), so they are not compared with peers: "
            "make sure that producers and consumers run the same ones.",
            name,
            error,
        )
        return None


def _hidden(model: Any) -> int:
    return int(model.get_inputs_embeds_size())


def _possible_widths(vllm_config: Any) -> frozenset[int]:
    """Columns an encoder output of this model could have.

    The width of the language model's input, or more of it where the encoder
    adds the outputs of inner layers (DeepStack); four more columns of positions
    where video tokens are pruned.
    """
    model = vllm_config.model_config
    hidden = _hidden(model)
    vision = getattr(model.hf_config, "vision_config", None)
    levels = getattr(vision, "deepstack_visual_indexes", None) or ()
    widths = {hidden, hidden * (1 + len(levels))}
    if getattr(model.multimodal_config, "video_pruning_rate", None):
        widths |= {width + 4 for width in widths}
    return frozenset(widths)


def watch_resets(watcher: Callable[[], None]) -> Callable[[], None]:
    """Have ``watcher`` called when this process' vLLM empties a scheduler's encoder cache.

    vLLM has no connector hook for it. Returns what ends it.
    """
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    def watched(reset: Callable[..., None], watchers: list[Any]) -> Callable[..., None]:
        def emptied(manager: Any) -> None:
            reset(manager)
            for one in tuple(watchers):
                one()

        return emptied

    return _watch(EncoderCacheManager, "reset", watched, watcher)


def watch_weights(
    vllm_config: Any, identity: Identity, changed: Callable[[Identity], None]
) -> Callable[[], None]:
    """Have ``changed`` called when an engine of this process may get other weights.

    vLLM has no connector hook for it. The call is told before and after, as a part of the
    workers may have new weights while it runs. Returns what ends it.
    """
    from vllm.v1.engine.core import EngineCore

    def calls(call: Callable[..., Any], watchers: list[Weights]) -> Callable[..., Any]:
        def watched(
            core: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
        ) -> Any:
            for one in tuple(watchers):
                one.call_begins(method)
            result = call(core, method, timeout, args, kwargs)
            for one in tuple(watchers):
                one.call_succeeded(method, args, kwargs or {})
            return result

        return watched

    def versions(name_version: Callable[..., Any], watchers: list[Weights]) -> Callable[..., Any]:
        def watched(core: Any, weight_version: str) -> Any:
            result = name_version(core, weight_version)
            for one in tuple(watchers):
                one.versioned(weight_version)
            return result

        return watched

    weights = Weights(identity, partial(_weights, vllm_config), changed)
    ends = [
        _watch(EngineCore, "collective_rpc", calls, weights),
        _watch(EngineCore, "set_weight_version", versions, weights),
    ]

    def end() -> None:
        for one in ends:
            one()

    return end


def _watch(
    owner: type, name: str, watched: Callable[[Any, list[Any]], Any], watcher: Any
) -> Callable[[], None]:
    """Put ``watcher`` on the list that a method of vLLM's is wrapped with; returns what ends it."""
    method = getattr(owner, name)
    watchers: list[Any] | None = getattr(method, "ec_connector_watchers", None)
    if watchers is None:
        watchers = []
        wrapper: Any = wraps(method)(watched(method, watchers))
        wrapper.ec_connector_watchers = watchers
        setattr(owner, name, wrapper)
    watchers.append(watcher)
    return partial(watchers.remove, watcher)
