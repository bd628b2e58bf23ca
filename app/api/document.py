"""The OpenAPI document, as it is kept in openapi/openapi.json."""

from __future__ import annotations

import json

from app.api.app import create_app
from app.service.node import Node
from app.settings import load_settings


def openapi_document() -> str:
    """Independent of settings and machine: the same text everywhere."""
    node = Node(load_settings(overrides={"role": "prefill"}), url="http://127.0.0.1:0")
    return json.dumps(create_app(node).openapi(), indent=2, sort_keys=True) + "\n"
