"""The sections of a node's settings, as frozen objects: names, defaults and limits of every key."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from app.hosts import Rule

Seconds = Annotated[float, Field(gt=0, le=86_400)]
"""Always finite: no deadline may be switched off."""
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HttpSettings(Section):
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="0 takes any free port; the bound one is published")
    port_taken: Literal["fail", "any"] = Field("fail", description="what to do when the port is taken")
    advertise: str = Field("", description="host that peers use to reach this node; default: host")
    max_body_bytes: int = Field(4 << 20, ge=1024, description="larger bodies are refused")
    tls_cert: Path | None = Field(None, description="certificate chain (PEM): serve, and ask peers, by HTTPS")
    tls_key: Path | None = Field(None, description="its private key (PEM)")
    tls_ca: Path | None = Field(
        None, description="who signs peers' certificates (PEM); default: the system's"
    )

    @property
    def scheme(self) -> Literal["http", "https"]:
        return "http" if self.tls_cert is None else "https"

    @field_validator("advertise")
    @classmethod
    def _host_only(cls, value: str) -> str:
        """A name or an address; the port is always the one that was bound."""
        if re.search(r"[/\s]", value) or (":" in value and not _is_ipv6(value)):
            raise ValueError(f"{value!r} is no host name without scheme and port")
        return value


class AuthSettings(Section):
    """Each token is a value or a file. The others narrow what the first one is needed for."""

    token: SecretStr | None = Field(
        None, description="of operators: for every call but, with a peer token, peers'"
    )
    token_file: Path | None = Field(None, description="file that holds it")
    read_token: SecretStr | None = Field(
        None, description="reads statistics, rooms and caches; changes nothing"
    )
    read_token_file: Path | None = Field(None, description="file that holds it")
    request_token: SecretStr | None = Field(None, description="of clients: sends requests, and nothing else")
    request_token_file: Path | None = Field(None, description="file that holds it")
    peer_token: SecretStr | None = Field(None, description="between nodes, equal on all; default: auth.token")
    peer_token_file: Path | None = Field(None, description="file that holds it")


class ModelSettings(Section):
    name: Literal["smollm2", "glm-dsa-tiny", "toy", "toy-dsa"] = Field(
        "smollm2",
        description="glm-dsa-tiny: random weights, with latent, index and draft; the toys need no weights",
    )
    overrides: dict[str, Any] = Field({}, description="keys of the model's config that are replaced (JSON)")
    index_topk_freq: int = Field(0, ge=0, description="every n-th layer has its own index; 0: as configured")
    index_skip_topk_offset: int = Field(0, ge=0, description="first layer of that count; 0: as configured")
    draft: bool = Field(True, description="use the model's draft (MTP) layer where it has one")
    draft_tokens: int = Field(1, ge=1, le=8, description="tokens that the draft proposes a decode step")
    kv: Literal["together", "apart"] = Field("together", description="K and V in one buffer or in two")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: float32 on CPU (five times as fast there), bfloat16 on CUDA"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where forwards run and pages lie")
    threads: int = Field(
        1, ge=1, le=256, description="threads of one forward; equal at both ends for equal bits"
    )
    layer_delay_s: float = Field(0.0, ge=0, le=60, description="toy model only: time that a layer takes")


class CacheSettings(Section):
    page_size: int = Field(64, ge=1, le=4096, description="tokens a page")
    pages: Count = Field(256, description="L1 pages of each rank of this node")
    dtype: Literal["auto", "float32", "bfloat16", "fp8"] = Field(
        "auto", description="how KV is stored; auto: as the model computes"
    )
    reuse: Literal["off", "page", "exact"] = Field(
        "page",
        description="reuse of cached prefixes; exact: on the chunk grid and of prefill's pages only, equal bits",
    )
    eviction: Literal["lru", "slru", "s3fifo", "lhd"] = Field(
        "lhd", description="what goes first, in L1 and L2; docs/decisions.md says why it is lhd"
    )
    slots: Count = Field(64, description="metadata slots: rooms that decode may await at once")


class HiCacheSettings(Section):
    """L2: pinned host memory behind the pages of L1. Off until it has a size."""

    host_ratio: float = Field(0.0, ge=0, le=1000, description="L2 pages for each L1 page of a rank; 0: no L2")
    host_bytes: int | None = Field(None, ge=1, description="bytes of L2 of each rank; wins over the ratio")
    layout: Literal["layer_first", "page_first", "page_first_direct", "layer_page_first"] = Field(
        "layer_first", description="order of items in host memory"
    )
    copy_backend: Literal["kernel", "direct"] = Field("kernel", description="how pages are copied")
    storage: Literal["none", "file"] = Field("none", description="a third tier; there is none yet")
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = Field(
        "write_through", description="when pages are copied to L2"
    )
    selective_hits: Count = Field(2, description="uses after which write_through_selective copies")
    l1_room: float = Field(0.02, ge=0, lt=1, description="part of L1 that eviction keeps free")
    l2_room: float = Field(0.02, ge=0, lt=1, description="part of L2 that eviction keeps free")
    load_s: Seconds = Field(30.0, description="waiting for one layer of a load")
    lost_s: Seconds = Field(60.0, description="copies of which nothing was heard: their pages come back")
    failed_load: Literal["recompute", "fail"] = Field(
        "recompute", description="a prefix that does not arrive is computed, or fails its request"
    )
    strict: bool = Field(False, description="refuse a copy backend without prepared loads")
    checks: Literal["off", "full"] = Field("off", description="digests of pages at each crossing; for tests")

    @property
    def enabled(self) -> bool:
        return self.host_ratio > 0 or self.host_bytes is not None


class PrefillSettings(Section):
    chunk_tokens: int = Field(2048, ge=1, description="tokens a forward; a multiple of the page size")
    max_input_tokens: Count = Field(4096, description="a longer prompt is refused")


class CpSettings(Section):
    """Context parallelism of a prefill node."""

    size: int = Field(1, ge=1, le=64, description="ranks, each with a pool and a transfer session of its own")
    shared_kv: bool = Field(False, description="store each page on one rank only; needed by a size above 1")
    split: Literal["zigzag", "contiguous", "round_robin"] = Field(
        "zigzag", description="how a chunk's rows are shared out; round_robin does not go with shared KV"
    )


class TransferSettings(Section):
    mode: Literal["per_layer", "monolithic"] = Field(
        "per_layer", description="send during the forward, or all layers after it"
    )
    group_layers: Count = Field(8, description="layers that are sent together")
    taper: bool = Field(True, description="shrink the groups toward the last layer")
    digests: Literal["off", "sampled", "full"] = Field(
        "sampled", description="pages whose digests decode compares; equal at both ends"
    )
    lanes: int = Field(4, ge=1, le=64, description="TCP connections the engine keeps for each peer")
    window_descriptors: int = Field(64, ge=1, le=512, description="writes in the engine for one peer")
    window_bytes: int = Field(16 << 20, ge=1 << 16, description="bytes in the engine for one peer")
    descriptor_bytes: int = Field(1 << 20, ge=1 << 12, description="longer runs are cut")
    retries: int = Field(2, ge=0, le=10, description="further tries of a failed write")
    retry_after_s: Seconds = Field(1.1, description="the engine refuses a failed peer for a second")
    progress_timeout_s: int = Field(8, ge=1, le=600, description="the engine's own timeout")
    deadline_s: Seconds = Field(30.0, description="one group's write, retries included")
    late_landing_s: Seconds = Field(10.0, description="how long a failed write may still land")


class DeadlineSettings(Section):
    handshake_s: Seconds = Field(5.0, description="answer to a handshake")
    message_s: Seconds = Field(5.0, description="answer to any other message between nodes")
    bootstrap_s: Seconds = Field(30.0, description="prefill: from the request to decode's pages")
    parked_s: Seconds = Field(30.0, description="prefill: from decode's pages to the request")
    queue_s: Seconds = Field(120.0, description="waiting for pages or a forward")
    forward_s: Seconds = Field(300.0, description="one prompt's forwards")
    stall_s: Seconds = Field(60.0, description="a forward without a layer's progress is dead")
    transfer_s: Seconds = Field(300.0, description="decode: from the announcement to the last byte")
    decode_s: Seconds = Field(600.0, description="decode: all steps of one request")
    drain_s: Seconds = Field(20.0, description="waiting for a drain acknowledgement")
    quarantine_s: Seconds = Field(45.0, description="pages whose writer was not proven idle")
    heartbeat_s: Seconds = Field(1.0, description="between two questions to a peer with shared rooms")
    heartbeat_misses: int = Field(3, ge=1, le=100, description="unanswered in a row: its rooms fail")
    lease_s: Seconds = Field(
        4.0, description="prefill writes while decode has confirmed the room for so long"
    )
    breaker_open_s: Seconds = Field(5.0, description="how long a peer that did not answer is not tried")
    tombstone_s: Seconds = Field(30.0, description="how long an aborted room is remembered")
    shutdown_s: Seconds = Field(15.0, description="what live rooms get to finish after SIGTERM")


class LimitSettings(Section):
    queued_requests: Count = Field(256, description="waiting for their turn, or parked")
    rooms_per_peer: Count = Field(
        512, description="live rooms shared with one peer; more are refused with 429"
    )
    bootstrap_hosts: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        (),
        description="prefill nodes that requests may name (JSON list of names, addresses, networks, each with "
        "or without :port); default: loopback, or the networks of http.host",
    )
    max_new_tokens: Count = Field(1024, description="a request for more is refused")
    default_new_tokens: Count = Field(64, description="where a request names no number")

    @field_validator("bootstrap_hosts")
    @classmethod
    def _rules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            Rule.parse(entry)
        return value


class DiagnosticSettings(Section):
    """Off by default: each costs time, and says so when it is on."""

    synchronise: bool = Field(False, description="wait for the device at each layer's end")
    check_owners: bool = Field(False, description="check the owner of every page of a request")


class LogSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="success is debug")
    format: Literal["auto", "json", "console"] = Field("auto", description="auto: console on a terminal")


def _is_ipv6(host: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False
