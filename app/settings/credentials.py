"""Tokens and certificates, out of the settings or the files that they name."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from enum import StrEnum

from app.errors import SettingsError
from app.settings.sections import AuthSettings, HttpSettings

_TOKEN = re.compile(r"[!-~]+")
"""Visible ASCII: what a header carries unchanged."""


class Scope(StrEnum):
    """What a token is good for."""

    READ = "read"
    REQUEST = "request"
    PEER = "peer"
    ADMIN = "admin"


TOKENS: Mapping[str, frozenset[Scope]] = {
    "token": frozenset({Scope.READ, Scope.REQUEST, Scope.ADMIN}),
    "read_token": frozenset({Scope.READ}),
    "request_token": frozenset({Scope.REQUEST}),
    "peer_token": frozenset({Scope.PEER}),
}
"""The keys of section `auth`, each of which has a twin `_file`."""


def is_given(auth: AuthSettings, name: str) -> bool:
    return getattr(auth, name) is not None or getattr(auth, f"{name}_file") is not None


def secret(auth: AuthSettings, name: str = "token") -> str | None:
    """A token, out of the settings or its file. SettingsError, without the token, when it is none."""
    key, token = f"auth.{name}", None
    value, path = getattr(auth, name), getattr(auth, f"{name}_file")
    if value is not None:
        token = value.get_secret_value()
    elif path is not None:
        key = f"auth.{name}_file"
        try:
            token = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            # the error of a decoder would show a part of the file
            why = error if isinstance(error, OSError) else "it is no text"
            raise SettingsError(f"{key}: cannot read {path}: {why}") from None
    # an empty token would be matched by an empty one
    if token is not None and not _TOKEN.fullmatch(token):
        raise SettingsError(f"{key}: a token is visible ASCII characters without spaces, at least one")
    return token


def peer_secret(auth: AuthSettings) -> str | None:
    """What a node shows to its peers."""
    return secret(auth, "peer_token") or secret(auth)


def scopes(auth: AuthSettings) -> dict[str, frozenset[Scope]]:
    """Every token with what it is good for. SettingsError, without the tokens, when two are one."""
    tokens = {name: token for name in TOKENS if (token := secret(auth, name)) is not None}
    if len(set(tokens.values())) < len(tokens):
        raise SettingsError(f"auth: two of {', '.join(tokens)} are one token; its scopes would be unclear")
    found = dict(TOKENS)
    if "peer_token" not in tokens:
        found["token"] |= {Scope.PEER}
    return {token: found[name] for name, token in tokens.items()}


def server_tls(http: HttpSettings) -> ssl.SSLContext | None:
    """For the node's own port. SettingsError when certificate and key cannot be used."""
    if http.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # a key that needs a password would ask the terminal for it
        context.load_cert_chain(http.tls_cert, http.tls_key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise SettingsError(f"http.tls_cert or http.tls_key: cannot use them: {error}") from error
    return context


def client_tls(http: HttpSettings) -> ssl.SSLContext | None:
    """For calls to peers, whose names and certificates are checked. SettingsError for a bad CA file."""
    if http.tls_cert is None:
        return None
    try:
        return ssl.create_default_context(cafile=http.tls_ca)
    except (OSError, ValueError) as error:
        raise SettingsError(f"http.tls_ca: cannot use {http.tls_ca}: {error}") from error
