"""The router as an endpoint picker: a gRPC server that Envoy's ext_proc filter asks where each request should go.

Envoy streams, encrypts and retries; this process only chooses, by the same policies as for its own clients. Needs the
extra ``ext-proc``. ``docs/xpyd.md`` says how Envoy is told of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from importlib.util import find_spec
from typing import Any

from p2pkv.address import split_address
from p2pkv.errors import ConfigError, ControlError
from p2pkv_proxy.picking import DESTINATION, PREFILLER, Picked, Picking, Refused
from p2pkv_proxy.services import Services
from p2pkv_proxy.tls import Certificate, ServedCertificate

_log = logging.getLogger(__name__)

_METADATA = "envoy.lb"
"""The namespace in which Envoy's load balancer looks for who was picked."""
_SUBSET_METADATA, _SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
"""Where Envoy says which endpoints there are to choose from, if not all."""
_PIECE = 62_000
"""Bytes of a body in one message back to Envoy, which takes 64 KiB."""
_MESSAGE_SLACK = 1 << 20
"""Of a message besides its body: headers and metadata."""
_GRACE_S = 5.0
_NONE, _STREAMED, _BUFFERED, _PARTIAL, _DUPLEX = range(5)
"""``ProcessingMode.BodySendMode``."""


def unavailable() -> str | None:
    """Return what is missing for it, as one sentence, or None."""
    if all(_is_there(name) for name in ("grpc", "google.protobuf")):
        return None
    return "--ext-proc needs grpcio and protobuf; pip install 'p2pkv[ext-proc]'"


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not there either
        return False


class ExtProc:
    """Answers Envoy from :meth:`start` to :meth:`close`, on the loop of both."""

    def __init__(
        self,
        listen: str,
        services: Services,
        certificate: ServedCertificate | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        """Raises :class:`ConfigError` without what it needs.

        ``certificate``: Envoy speaks TLS. ``is_shared``: other workers of this router listen there as well.
        """
        self._is_shared = is_shared
        if (missing := unavailable()) is not None:
            raise ConfigError(missing)
        self._host, self._port = split_address("--ext-proc", listen)
        self._services = services
        self._certificate = certificate
        self._server: Any = None
        self.port = 0
        """Where it listens, once it does."""

    async def start(self) -> None:
        """Listen. Raises :class:`ControlError`."""
        import grpc.aio

        settings = self._services.settings
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=settings.max_in_flight,
            options=[
                ("grpc.max_receive_message_length", settings.max_body + _MESSAGE_SLACK),
                ("grpc.max_metadata_size", 64 * 1024),
                ("grpc.max_concurrent_streams", settings.max_in_flight),
                ("grpc.so_reuseport", int(self._is_shared)),
            ],
        )
        self._server.add_generic_rpc_handlers((_handler(self._services),))
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"{host}:{self._port}"
        try:
            if self._certificate is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, _credentials(self._certificate))
        except RuntimeError as error:
            raise ControlError(f"cannot listen on {address} for ext_proc: {error}") from error
        await self._server.start()
        _log.info("Envoy is answered on %s:%d", host, self.port)

    async def close(self) -> None:
        """Take no new requests; those under way have a moment. Idempotent."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(_GRACE_S)


def _credentials(served: ServedCertificate) -> Any:
    """Return what gRPC asks at each handshake for the certificate of now, on a thread of its own."""
    import grpc

    def pair(certificate: Certificate) -> Any:
        return grpc.ssl_server_certificate_configuration([(certificate.key, certificate.chain)])

    return grpc.dynamic_ssl_server_credentials(pair(served.certificate), lambda: pair(served.certificate))


def _handler(services: Services) -> Any:
    """Return what gRPC calls, once for each request that Envoy has."""
    import grpc

    from p2pkv_proxy import ext_proc_messages as pb

    async def process(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        picking = Picking(services)
        try:
            conversation = _Conversation(services, picking)
            async for answer in conversation.run(requests):
                yield answer
        finally:
            picking.end()

    method = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(pb.SERVICE, {pb.METHOD: method})


class _Conversation:
    """Envoy's messages of one request, and what it is told."""

    def __init__(self, services: Services, picking: Picking) -> None:
        from p2pkv_proxy import ext_proc_messages as pb

        self._pb = pb
        self._settings = services.settings
        self._picking = picking
        self._request_mode = self._response_mode = _DUPLEX  # what the inference extension has set up
        self._kept: list[bytes] = []  # goes back to Envoy, where that hands the body over
        self._until = time.monotonic() + self._settings.body_timeout
        self._is_over = False

    async def run(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Answer each message as Envoy's modes ask for, until it has no more or is told that it is refused."""
        messages = aiter(requests)
        while not self._is_over:
            limit = max(0.0, self._until - time.monotonic())
            try:
                message = await asyncio.wait_for(anext(messages), limit)
            except StopAsyncIteration:
                return
            except asyncio.TimeoutError:
                if not self._picking.is_read:
                    yield self._refusal(self._picking.late())
                return  # an answer that takes longer than any may: it counts no more
            async for answer in self._answer(message):
                yield answer

    async def _answer(self, message: Any) -> AsyncIterator[Any]:
        pb = self._pb
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            async for answer in self._head(message):
                yield answer
        elif kind == "request_body":
            async for answer in self._body(message.request_body):
                yield answer
        elif kind == "request_trailers":
            if not self._picking.is_read:  # they end a body without end_of_stream
                async for answer in self._picked(has_body=True):
                    yield answer
            if not self._is_over:
                yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
        elif kind == "response_headers":
            self._picking.answered(_status(message.response_headers.headers))
            if message.response_headers.end_of_stream:
                self._picking.completed()
            yield pb.ProcessingResponse(response_headers=pb.HeadersResponse())
        elif kind == "response_body":
            yield self._response_body(message)
        elif kind == "response_trailers":
            self._picking.completed()
            yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

    async def _head(self, message: Any) -> AsyncIterator[Any]:
        pb = self._pb
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        headers = message.request_headers
        self._picking.head(_pairs(headers.headers), _subset(message))
        if headers.end_of_stream or self._request_mode == _NONE:
            async for answer in self._picked(has_body=False):
                yield answer
        elif self._request_mode != _DUPLEX:
            # Envoy sends the body only when this is answered; what it is to say comes with the body
            yield pb.ProcessingResponse(request_headers=pb.HeadersResponse())

    async def _body(self, body: Any) -> AsyncIterator[Any]:
        if self._picking.is_read:
            return
        refused = self._picking.body(body.body)
        if refused is not None:
            yield self._refusal(refused)
            return
        if self._request_mode == _DUPLEX:
            self._kept.append(body.body)
        if body.end_of_stream or self._request_mode in (_BUFFERED, _PARTIAL):
            async for answer in self._picked(has_body=True):
                yield answer
        elif self._request_mode == _STREAMED:
            yield self._pb.ProcessingResponse(request_body=self._pb.BodyResponse())

    async def _picked(self, *, has_body: bool) -> AsyncIterator[Any]:
        """Say who was picked: with the headers where these still wait, else with the body."""
        pb = self._pb
        picked = await self._picking.pick()
        if isinstance(picked, Refused):
            yield self._refusal(picked)
            return
        self._until = time.monotonic() + self._settings.request_timeout
        common = pb.CommonResponse(header_mutation=_mutation(pb, picked), clear_route_cache=True)
        if has_body and self._request_mode != _DUPLEX:
            answer = pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))
            answer.dynamic_metadata.update(_metadata(picked))
            yield answer
            return
        answer = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
        answer.dynamic_metadata.update(_metadata(picked))
        yield answer
        if has_body:
            body = b"".join(self._kept)
            self._kept.clear()
            for first in range(0, max(1, len(body)), _PIECE):
                piece = body[first : first + _PIECE]
                yield self._streamed("request_body", piece, is_last=first + _PIECE >= len(body))

    def _response_body(self, message: Any) -> Any:
        body = message.response_body
        if body.end_of_stream:
            self._picking.completed()
        if self._response_mode == _DUPLEX:
            return self._streamed("response_body", body.body, is_last=body.end_of_stream)
        return self._pb.ProcessingResponse(response_body=self._pb.BodyResponse())

    def _streamed(self, field: str, piece: bytes, *, is_last: bool) -> Any:
        pb = self._pb
        streamed = pb.StreamedBodyResponse(body=piece, end_of_stream=is_last)
        common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
        return pb.ProcessingResponse(**{field: pb.BodyResponse(response=common)})

    def _refusal(self, refused: Refused) -> Any:
        pb = self._pb
        self._is_over = True
        answer = pb.ProcessingResponse()
        immediate = answer.immediate_response
        immediate.status.code = refused.status
        immediate.body = refused.body
        headers = {"content-type": "application/json"}
        if refused.retry_after is not None:
            headers["retry-after"] = str(refused.retry_after)
        _set_headers(immediate.headers, headers)
        return answer


def _set_headers(mutation: Any, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        option = mutation.set_headers.add()
        option.header.key = name
        option.header.raw_value = value.encode()
        option.append_action = (
            2  # OVERWRITE_IF_EXISTS_OR_ADD: a client that names an endpoint itself is not heard
        )


def _mutation(pb: Any, picked: Picked) -> Any:
    mutation = pb.HeaderMutation()
    _set_headers(mutation, picked.headers)
    if PREFILLER not in picked.headers:
        mutation.remove_headers.append(PREFILLER)  # a client's own word is none
    return mutation


def _metadata(picked: Picked) -> dict[str, dict[str, str]]:
    return {_METADATA: {DESTINATION: picked.destination}}


def _pairs(headers: Any) -> list[tuple[str, bytes]]:
    return [(header.key, header.raw_value or header.value.encode()) for header in headers.headers]


def _status(headers: Any) -> int:
    for name, value in _pairs(headers):
        if name == ":status" and value.isdigit():
            return int(value)
    return 0


def _subset(message: Any) -> list[str]:
    """Return the endpoints that Envoy names to choose from; none: all."""
    fields = message.metadata_context.filter_metadata
    if _SUBSET_METADATA not in fields:
        return []
    value = fields[_SUBSET_METADATA].fields.get(_SUBSET)
    if value is None:
        return []
    named = [item.string_value for item in value.list_value.values] or value.string_value.split(",")
    return [name.strip() for name in named if name.strip()]
