"""The description of the API at /openapi.json: bodies, errors, and what is no JSON."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

ERRORS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "A valid key is needed.",
    "403": "A page of another origin may not use the server.",
    "404": "There is no such path or model.",
    "408": "The request did not arrive in time.",
    "413": "The body is too long.",
    "414": "The path is too long.",
    "415": "The body is not said to be JSON.",
    "421": "`Host` is not a name of this server.",
    "429": "The queue is full, or the client has too many connections; see `Retry-After`.",
    "431": "The header is too long.",
    "500": "The engine had to end the request.",
    "503": "The engine has ended or does not answer, or the server shuts down.",
    "504": "The time limit of the request has passed.",
}

_OF_EVERY_PATH = ("400", "401", "408", "414", "421", "429", "431", "500", "503")
_OF_BODIES = ("403", "404", "413", "415")

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


class DescribedAPI(FastAPI):
    """An application that describes its errors too."""

    def openapi(self) -> dict[str, Any]:
        """The description; routes that are added after the first call are not in it."""
        if self.openapi_schema is None:
            self.openapi_schema = _describe(self)
        return self.openapi_schema


def _describe(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    found.get("components", {}).pop("schemas", None)  # FastAPI's own errors, which we do not send
    for path, operations in found["paths"].items():
        for operation in operations.values():
            statuses = {*_OF_EVERY_PATH}
            if "requestBody" in operation:
                statuses |= {*_OF_BODIES}
            if "{" in path:
                statuses |= {"404"}
            if "/completions" in path:
                statuses |= {"504"}
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
