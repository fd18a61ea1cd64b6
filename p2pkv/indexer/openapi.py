"""The description of the indexer API that programs read: OpenAPI, made of the bodies that requests are decoded into."""

from __future__ import annotations

from typing import Any

import msgspec

from p2pkv.indexer.requests import Query, QueryByHash, Register, Unregister

_POSTS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/query": (Query, "Say who has how much of a prompt, by its tokens"),
    "/query_by_hash": (QueryByHash, "Say who has how much of a prompt, by the names of its blocks"),
    "/register": (Register, "Say what an instance is"),
    "/unregister": (Unregister, "Forget an instance"),
}
_GETS = {
    "/workers": "List what is registered",
    "/health": "Say that the node is there",
    "/openapi.json": "Return this description",
}


def description(version: str, *, needs_token: bool) -> dict[str, object]:
    """Return it; ``version`` is p2pkv's."""
    bodies = [body for body, _ in _POSTS.values()]
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    components: dict[str, Any] = {"schemas": {**schemas, "Refusal": _REFUSAL}}
    paths: dict[str, object] = {path: {"get": _operation(summary)} for path, summary in _GETS.items()}
    for path, (body, summary) in _POSTS.items():
        schema = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
        request = {"required": True, "content": {"application/json": schema}}
        paths[path] = {"post": {**_operation(summary), "requestBody": request}}
    told: dict[str, object] = {
        "openapi": "3.1.0",
        "info": {"title": "p2pkv indexer", "version": version},
        "paths": paths,
        "components": components,
    }
    if needs_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        told["security"] = [{"token": []}]
    return told


_REFUSAL = {
    "type": "object",
    "properties": {"error": {"type": "string", "description": "What was wrong, and what to do."}},
    "required": ["error"],
}


def _operation(summary: str) -> dict[str, object]:
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer", "content": {"application/json": {"schema": {}}}},
            "default": {"description": "Why there is none", "content": refusal},
        },
    }
