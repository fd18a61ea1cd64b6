"""The toy transport keeps every rule of p2pkv's transports."""

from p2pkv.testing.transport_contract import TransportContract


class TestToy(TransportContract):
    factory = "p2pkv_toy:ToyTransport"
