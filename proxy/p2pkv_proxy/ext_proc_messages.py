"""Envoy's ext_proc messages, as far as a picker uses them: numbers and types of ``envoy.service.ext_proc.v3``'s fields.

Messages have no names on the wire, so these have their own, and may be beside Envoy's in a process. What Envoy sends in
other fields is skipped, as protobuf does with fields of later versions. They are defined here because the package that
has all of Envoy's brings files of other packages along, of a version of its own.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass

SERVICE, METHOD = "envoy.service.ext_proc.v3.ExternalProcessor", "Process"
"""What Envoy calls: both ways a stream."""
_PACKAGE = "p2pkv.ext_proc"
_STRUCT = "google.protobuf.Struct"
_SCALARS = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "enum": FieldDescriptorProto.TYPE_INT32,  # on the wire they are the same, and any number is taken
    "string": FieldDescriptorProto.TYPE_STRING,
}

# name of a message: name of a field: its number and type. "+" before a type: any number of it. "= NAME": one of these
# at most is there. "string -> TYPE": a map.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "+HeaderValue")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "enum")},
    "HeaderMutation": {"set_headers": (1, "+HeaderValueOption"), "remove_headers": (2, "+string")},
    "Metadata": {"filter_metadata": (1, f"string -> {_STRUCT}")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProtocolConfiguration": {"request_body_mode": (1, "enum"), "response_body_mode": (2, "enum")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders = request"),
        "response_headers": (3, "HttpHeaders = request"),
        "request_body": (4, "HttpBody = request"),
        "response_body": (5, "HttpBody = request"),
        "request_trailers": (6, "HttpTrailers = request"),
        "response_trailers": (7, "HttpTrailers = request"),
        "metadata_context": (8, "Metadata"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse = mutation")},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "enum")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse = response"),
        "response_headers": (2, "HeadersResponse = response"),
        "request_body": (3, "BodyResponse = response"),
        "response_body": (4, "BodyResponse = response"),
        "request_trailers": (5, "TrailersResponse = response"),
        "response_trailers": (6, "TrailersResponse = response"),
        "immediate_response": (7, "ImmediateResponse = response"),
        "dynamic_metadata": (8, _STRUCT),
    },
}


def _message(name: str, fields: dict[str, tuple[int, str]]) -> DescriptorProto:
    message = DescriptorProto(name=name)
    for field, (number, said) in fields.items():
        kind, _, group = said.partition(" = ")
        added = message.field.add(name=field, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        if " -> " in kind:
            kind = f"+{name}.{_entry(message, field, kind.partition(' -> ')[2])}"
        if kind.startswith("+"):
            kind, added.label = kind[1:], FieldDescriptorProto.LABEL_REPEATED
        _set_type(added, kind)
        if group:
            if group not in [one.name for one in message.oneof_decl]:
                message.oneof_decl.add(name=group)
            added.oneof_index = [one.name for one in message.oneof_decl].index(group)
    return message


def _entry(message: DescriptorProto, field: str, kind: str) -> str:
    """Add what a map is on the wire, a repeated message of keys and values; return its name."""
    named = f"{field.title().replace('_', '')}Entry"
    entry = message.nested_type.add(name=named)
    entry.options.map_entry = True
    for name, number, of in (("key", 1, "string"), ("value", 2, kind)):
        _set_type(entry.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL), of)
    return named


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{kind}" if kind == _STRUCT else f".{_PACKAGE}.{kind}"


def _defined() -> None:
    file = FileDescriptorProto(
        name="p2pkv/ext_proc.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )
    file.message_type.extend(_message(name, fields) for name, fields in _MESSAGES.items())
    Default().AddSerializedFile(file.SerializeToString())


def _class(name: str) -> Any:  # protobuf makes these classes at run time
    return GetMessageClass(Default().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


_defined()
ProcessingRequest = _class("ProcessingRequest")
ProcessingResponse = _class("ProcessingResponse")
BodyMutation = _class("BodyMutation")
BodyResponse = _class("BodyResponse")
CommonResponse = _class("CommonResponse")
HeaderMutation = _class("HeaderMutation")
HeadersResponse = _class("HeadersResponse")
StreamedBodyResponse = _class("StreamedBodyResponse")
TrailersResponse = _class("TrailersResponse")
