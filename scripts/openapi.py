"""Writes the OpenAPI document of the HTTP door, from descriptors with comments: `openapi.py DESCRIPTOR_SET`, to stdout.

Each unary RPC is a POST: /v1/messages:prepare is MessageService.Prepare. Streams have no place there.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

COLLECTIONS = {"MessageService": "messages", "ConsumptionService": "consumptions", "AdminService": "admin"}
_SERVICE, _METHOD, _MESSAGE, _ENUM, _FIELD, _VALUE = 6, 2, 4, 5, 2, 2  # places in a file, as comments name them
_Kind = FieldDescriptorProto
_INTEGER = {"type": "integer", "format": "int32"}
_LONG = {
    "type": ["string", "integer"],
    "format": "int64",
    "description": "Answered as a string, as JSON has no such numbers.",
}
SCALARS: dict[int, dict[str, Any]] = {
    _Kind.TYPE_STRING: {"type": "string"},
    _Kind.TYPE_BYTES: {"type": "string", "contentEncoding": "base64"},
    _Kind.TYPE_BOOL: {"type": "boolean"},
    _Kind.TYPE_INT32: _INTEGER,
    _Kind.TYPE_UINT32: _INTEGER,
    _Kind.TYPE_INT64: _LONG,
    _Kind.TYPE_UINT64: _LONG,
    _Kind.TYPE_DOUBLE: {"type": "number", "format": "double"},
}
FIELD_MASK = {"type": "string", "description": "Names of fields with commas between them: `openLimit,ordered`."}
PROBLEM = {
    "type": "object",
    "description": "A refusal, as RFC 9457 has it. Without `reason`, the door itself refused the request.",
    "properties": {
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "A sentence that says what to do."},
        "code": {"type": "string", "description": "The status of gRPC, such as INVALID_ARGUMENT."},
        "reason": {"$ref": "#/components/schemas/Reason"},
        "field": {"type": "string", "description": "The field that is wrong, as the protos name it."},
        "messageId": {"type": "string", "description": "The message that stands in the way."},
        "retryAfterMs": {"type": "integer", "description": "Repeat the request after this time."},
    },
    "required": ["title", "status", "detail"],
}
SECURITY = {
    "key": {"type": "http", "scheme": "bearer", "description": "The key of an app, or the token of an operator."},
    "app": {"type": "apiKey", "in": "header", "name": "tmc-app", "description": "The app whose key it is."},
}
TAG_HEADER = {
    "name": "tmc-tag",
    "in": "header",
    "schema": {"type": "string"},
    "description": "The environment that the app runs in; without it, the default of its topic.",
}


def lower_camel(name: str) -> str:
    """lowerCamelCase of a method's UpperCamelCase, or of a field's snake_case, as the JSON of protobuf has it."""
    name = re.sub(r"_([a-z0-9])", lambda found: found[1].upper(), name)
    return name[:1].lower() + name[1:]


class Document:
    """Collect what the files of our services, and those that they import, describe."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self.paths: dict[str, Any] = {}
        self.schemas: dict[str, Any] = {"Problem": PROBLEM}
        self._maps: dict[str, DescriptorProto] = {}
        for file in files.file:
            if file.package == "tmc.v1" and all(service.name in COLLECTIONS for service in file.service):
                self._add(file)

    def _add(self, file: FileDescriptorProto) -> None:
        comments = {
            tuple(each.path): "\n".join(map(str.strip, each.leading_comments.strip().splitlines()))
            for each in file.source_code_info.location
        }
        for number, enum in enumerate(file.enum_type):
            texts = [comments.get((_ENUM, number), "")]
            texts += [
                f"- `{value.name}`: {text}"
                for place, value in enumerate(enum.value)
                if (text := comments.get((_ENUM, number, _VALUE, place)))
            ]
            self.schemas[enum.name] = {
                "type": "string",
                "description": "\n".join(texts).strip(),
                "enum": [value.name for value in enum.value],
            }
        for number, message in enumerate(file.message_type):
            self._add_message(message, (_MESSAGE, number), comments)
        for number, service in enumerate(file.service):
            for place, method in enumerate(service.method):
                if not method.server_streaming:
                    text = comments.get((_SERVICE, number, _METHOD, place), "")
                    path = f"/v1/{COLLECTIONS[service.name]}:{lower_camel(method.name)}"
                    self.paths[path] = {"post": _operation(service.name, method, text)}

    def _add_message(self, message: DescriptorProto, at: tuple[int, ...], comments: dict[tuple[int, ...], str]) -> None:
        for nested in message.nested_type:
            assert nested.options.map_entry, f"{message.name}.{nested.name}: only maps are nested"
            self._maps[f".tmc.v1.{message.name}.{nested.name}"] = nested
        properties = {}
        for place, each in enumerate(message.field):
            schema, text = self._schema(each), comments.get((*at, _FIELD, place), "")
            properties[each.json_name] = schema | ({"description": text} if text else {})
        described = {"description": comments[at]} if comments.get(at) else {}
        self.schemas[message.name] = {"type": "object", **described, "properties": properties}

    def _schema(self, field: FieldDescriptorProto) -> dict[str, Any]:
        entry = self._maps.get(field.type_name)
        if entry is not None:
            return {"type": "object", "additionalProperties": self._schema(entry.field[1])}
        one = self._one(field)
        return {"type": "array", "items": one} if field.label == _Kind.LABEL_REPEATED else dict(one)

    @staticmethod
    def _one(field: FieldDescriptorProto) -> dict[str, Any]:
        if field.type_name == ".google.protobuf.FieldMask":
            return FIELD_MASK
        if field.type_name:
            return {"$ref": f"#/components/schemas/{field.type_name.rpartition('.')[2]}"}
        return SCALARS[field.type]


def _operation(service: str, method: Any, text: str) -> dict[str, Any]:
    def content(kind: str, name: str) -> dict[str, Any]:
        return {kind: {"schema": {"$ref": f"#/components/schemas/{name}"}}}

    of_operators = service == "AdminService"
    return {
        "operationId": f"{service}.{method.name}",
        "tags": [service],
        "description": text,
        **({} if of_operators else {"parameters": [TAG_HEADER]}),
        "security": [{"key": []} if of_operators else {"key": [], "app": []}],
        "requestBody": {
            "required": True,
            "content": content("application/json", method.input_type.rpartition(".")[2]),
        },
        "responses": {
            "200": {
                "description": "Done.",
                "content": content("application/json", method.output_type.rpartition(".")[2]),
            },
            "default": {"description": "Refused.", "content": content("application/problem+json", "Problem")},
        },
    }


def main() -> None:
    files = FileDescriptorSet.FromString(Path(sys.argv[1]).read_bytes())
    document = Document(files)
    whole = {
        "openapi": "3.1.0",
        "info": {
            "title": "Transaction message center",
            "version": "v1",
            "description": "The calls of protos/ as JSON over HTTP. Generated by scripts/generate; docs/http.md explains it.",
        },
        "paths": document.paths,
        "components": {"schemas": dict(sorted(document.schemas.items())), "securitySchemes": SECURITY},
    }
    print(json.dumps(whole, indent=1, ensure_ascii=False))


main()
