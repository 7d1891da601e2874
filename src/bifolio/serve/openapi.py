"""The description of the API at /openapi.json: bodies, errors, and what is no JSON."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

ERRORS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "A valid key is needed.",
    "404": "There is no such path or model.",
    "408": "The request did not arrive in time.",
    "413": "The body is too long.",
    "429": "The queue is full; `Retry-After` says how long to wait.",
    "431": "The header is too long.",
    "500": "The engine had to end the request.",
    "503": "The engine has ended or does not answer, or the server shuts down.",
    "504": "The time limit of the request has passed.",
}

_OF_EVERY_PATH = ("401", "408", "413", "431", "500", "503")
_OF_BODIES = ("400", "404")
_OF_GENERATION = ("429", "504")

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The description of an application whose routes are all there."""
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    found.get("components", {}).pop("schemas", None)  # FastAPI's own errors, which we do not send
    for path, operations in found["paths"].items():
        for operation in operations.values():
            statuses = list(_OF_EVERY_PATH)
            if "requestBody" in operation or "{" in path:
                statuses += _OF_BODIES
            if "/completions" in path:
                statuses += _OF_GENERATION
            responses = operation["responses"]
            responses.pop("422", None)
            for status in sorted(statuses):
                responses[status] = {
                    "description": ERRORS[status],
                    "content": {"application/json": {"schema": _ERROR}},
                }
            if path == "/metrics":
                responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
            if "/completions" in path:
                responses["200"]["content"] |= {"text/event-stream": {"schema": {"type": "string"}}}
    return found


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The description of a JSON body, which its handler reads itself."""
    schema = _inlined(kind.model_json_schema())
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: dict[str, Any]) -> Any:
    """A JSON schema with its definitions in place of the references to them."""
    definitions = schema.pop("$defs", {})

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return walk(definitions[value["$ref"].rsplit("/", 1)[1]])
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    return walk(schema)
