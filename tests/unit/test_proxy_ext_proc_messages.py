"""The picker's own definitions of Envoy's messages, beside bytes that Envoy's classes have made (xds-protos 1.85)."""

from __future__ import annotations

from p2pkv_proxy import ext_proc_messages as pb

REQUEST = bytes.fromhex(
    "122d0a2b0a180a053a706174681a0f2f76312f636f6d706c6574696f6e730a0f0a073a6d6574686f641204504f535442580a560a14656e766f79"
    "2e6c622e7375627365745f68696e74123e0a3c0a25782d676174657761792d64657374696e6174696f6e2d656e64706f696e742d737562736574"
    "121332110a0f1a0d31302e302e302e313a383030304a150a016112100a0e0a0162120911000000000000f03f50015a0408041002"
)
"""Headers with both kinds of values, metadata, modes, and two fields that the picker does not know."""


def test_a_request_as_envoys_classes_write_it_is_read() -> None:
    request = pb.ProcessingRequest.FromString(REQUEST)
    assert request.WhichOneof("request") == "request_headers"
    headers = request.request_headers.headers.headers
    assert [(one.key, one.value, one.raw_value) for one in headers] == [
        (":path", "", b"/v1/completions"),
        (":method", "POST", b""),
    ]
    hint = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    assert list(hint["x-gateway-destination-endpoint-subset"]) == ["10.0.0.1:8000"]
    assert (request.protocol_config.request_body_mode, request.protocol_config.response_body_mode) == (4, 2)
    assert len(request.SerializeToString()) == len(REQUEST)  # what is not known is kept


def test_answers_have_the_bytes_that_envoy_reads() -> None:
    answer = pb.ProcessingResponse()
    common = answer.request_headers.response
    option = common.header_mutation.set_headers.add()
    option.header.key, option.header.raw_value, option.append_action = "k", b"v", 2
    common.header_mutation.remove_headers.append("gone")
    common.clear_route_cache = True
    assert answer.SerializeToString() == bytes.fromhex("0a180a1612120a0a0a060a016b1a017618021204676f6e652801")
    refusal = pb.ProcessingResponse()
    refusal.immediate_response.status.code = 429
    refusal.immediate_response.body = b"no"
    assert refusal.SerializeToString() == bytes.fromhex("3a090a0308ad031a026e6f")
    streamed = pb.StreamedBodyResponse(body=b"x", end_of_stream=True)
    body = pb.BodyResponse(
        response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
    )
    assert pb.ProcessingResponse(response_body=body).SerializeToString() == bytes.fromhex(
        "220b0a091a071a050a01781001"
    )
