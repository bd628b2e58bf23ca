"""Everything that can be set about a node, and what goes together with what."""

from __future__ import annotations

import ipaddress
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from app.settings.credentials import TOKENS, is_given
from app.settings.sections import (
    AuthSettings,
    CacheSettings,
    CpSettings,
    DeadlineSettings,
    DiagnosticSettings,
    HiCacheSettings,
    HttpSettings,
    LimitSettings,
    LogSettings,
    ModelSettings,
    PrefillSettings,
    TransferSettings,
)

PREFIX = "KVFERRY_"


class NodeSettings(BaseSettings):
    """Everything about one node."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, cli_kebab_case=True
    )

    role: Literal["prefill", "decode"] = Field(description="what this node does")
    trace: bool = Field(False, description="show page and logit digests in answers; costs time")
    http: HttpSettings = HttpSettings()
    auth: AuthSettings = AuthSettings()
    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    hicache: HiCacheSettings = HiCacheSettings()
    prefill: PrefillSettings = PrefillSettings()
    cp: CpSettings = CpSettings()
    transfer: TransferSettings = TransferSettings()
    deadlines: DeadlineSettings = DeadlineSettings()
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()
    diagnostics: DiagnosticSettings = DiagnosticSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # the file arrives as init values: below the environment, above the defaults
        return env_settings, init_settings

    @model_validator(mode="after")
    def _combinations(self) -> NodeSettings:
        if self.prefill.chunk_tokens % self.cache.page_size:
            raise ValueError(
                f"prefill.chunk_tokens ({self.prefill.chunk_tokens}) is no multiple of cache.page_size "
                f"({self.cache.page_size}): chunk boundaries lie on the page grid"
            )
        pages = -(-self.prefill.max_input_tokens // self.cache.page_size)
        if self.role == "prefill" and pages > self.cache.pages * self.cp.size:
            raise ValueError(
                f"cache.pages ({self.cache.pages}) cannot hold prefill.max_input_tokens "
                f"({self.prefill.max_input_tokens}): {pages} pages"
            )
        self._parallel()
        if self.deadlines.quarantine_s <= self.transfer.progress_timeout_s * 3:
            raise ValueError(
                f"deadlines.quarantine_s ({self.deadlines.quarantine_s}) must outlive the engine's own timeout "
                f"(3 x transfer.progress_timeout_s = {self.transfer.progress_timeout_s * 3})"
            )
        longest_s = self.deadlines.lease_s + self.transfer.deadline_s + self.transfer.late_landing_s
        if self.deadlines.quarantine_s <= longest_s:
            raise ValueError(
                f"deadlines.quarantine_s ({self.deadlines.quarantine_s}) must outlive a write: deadlines.lease_s, "
                f"transfer.deadline_s and transfer.late_landing_s are {longest_s:g} together"
            )
        if self.deadlines.lease_s <= 2 * self.deadlines.heartbeat_s:
            raise ValueError(
                f"deadlines.lease_s ({self.deadlines.lease_s:g}) must outlive two heartbeats, or one lost answer "
                f"ends a room: deadlines.heartbeat_s is {self.deadlines.heartbeat_s:g}"
            )
        self._guarded()
        if _is_any(self.http.host) and not self.http.advertise:
            raise ValueError(
                f"http.host ({self.http.host}) is every address: http.advertise must name one for the peers"
            )
        toy = self.model.name.startswith("toy")
        if self.model.layer_delay_s and not toy:
            raise ValueError("model.layer_delay_s is for the toy models only")
        if self.model.device == "cuda" and toy:
            raise ValueError("model.device (cuda): the toy models run on cpu only")
        if self.hicache.enabled and self.cache.reuse == "off":
            raise ValueError("hicache needs cache.reuse: without it nothing is kept in any tier")
        if self.hicache.lost_s <= self.hicache.load_s:
            raise ValueError(
                f"hicache.lost_s ({self.hicache.lost_s:g}) must outlive a copy: hicache.load_s is "
                f"{self.hicache.load_s:g}"
            )
        if self.cache.dtype != "auto" and toy:
            raise ValueError(f"cache.dtype ({self.cache.dtype}): the toy models store bytes")
        return self

    def _guarded(self) -> None:
        """Tokens and certificates: half of either protects nothing."""
        given = {name: is_given(self.auth, name) for name in TOKENS}
        for name in given:
            if getattr(self.auth, name) is not None and getattr(self.auth, f"{name}_file") is not None:
                raise ValueError(f"auth.{name} and auth.{name}_file are both set: one of them is enough")
        if not _is_loopback(self.http.host) and not given["token"]:
            raise ValueError(f"http.host ({self.http.host}) is no loopback address: auth.token must be set")
        narrower = next((name for name in given if given[name]), None)
        if narrower is not None and not given["token"]:
            raise ValueError(f"auth.{narrower} is set and auth.token is not: everything else would be open")
        http = self.http
        if (http.tls_cert is None) != (http.tls_key is None):
            raise ValueError("http.tls_cert and http.tls_key go together: one of them is missing")
        if http.tls_ca is not None and http.tls_cert is None:
            raise ValueError("http.tls_ca is set: without http.tls_cert peers are asked by plain HTTP")

    def _parallel(self) -> None:
        """What context parallelism goes together with."""
        cp = self.cp
        if cp.size > 1 and self.role == "decode":
            raise ValueError(f"cp.size ({cp.size}): a decode node has one rank")
        if cp.size > 1 and not cp.shared_kv:
            raise ValueError(f"cp.shared_kv is off: cp.size ({cp.size}) needs it, a copy a rank is not kept")
        if cp.shared_kv and cp.size == 1:
            raise ValueError("cp.shared_kv is on: it needs a cp.size above 1")
        if cp.shared_kv and cp.split == "round_robin":
            raise ValueError(
                "cp.split (round_robin): materialisation and transfer of shared KV (cp.shared_kv) do not know it"
            )

    def masked(self) -> dict[str, Any]:
        """Effective settings as plain values, secrets masked."""
        return self.model_dump(mode="json")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""
