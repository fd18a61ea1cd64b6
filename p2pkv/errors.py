"""The errors p2pkv raises, chosen by what the caller must rebuild.

Expected outcomes (a miss, a span that was rejected) are values, never exceptions. ::

    P2PKVError
    ├── ConfigError             a setting is unknown, malformed or contradicts another: fix the configuration
    ├── UsageError              the call's arguments are wrong; nothing was changed: fix the call
    │   └── NotRegisteredError  memory that no ``register_memory`` covers: register it first
    ├── ClosedError             the object was closed: start a new one
    ├── DeviceError             device memory can't be used: the driver, the device or its staging says no
    ├── TransportError          a transport can't do this here, or the way to one peer is gone: open a new endpoint
    ├── ControlError            the control plane can't start, or a peer refused a request
    │   ├── VersionError        the peer speaks another protocol version: upgrade one of the two
    │   └── ViewError           a peer's cluster view is malformed: it was dropped, nothing was changed
    └── MembershipError         the node can't be a member
        ├── DuplicateNodeError  a live node has this id: choose another ``node_id`` or stop that node
        └── RegistryError       the store of members' records can't be used: mend what the text says, start again
"""

from __future__ import annotations


class P2PKVError(Exception):
    """Anything p2pkv raises on purpose."""


class ConfigError(P2PKVError, ValueError):
    """A setting is unknown, malformed or contradicts another."""


class UsageError(P2PKVError, ValueError):
    """The arguments of a call are wrong; nothing was changed."""


class NotRegisteredError(UsageError):
    """A call names memory that no ``register_memory`` covers."""


class ClosedError(P2PKVError):
    """The object was closed."""


class DeviceError(P2PKVError):
    """Device memory can't be used: the driver, the device or its staging says no."""


class TransportError(P2PKVError):
    """A transport can't do this here, or the way to one peer is gone."""


class ControlError(P2PKVError):
    """The control plane can't start, or a peer refused a request."""


class VersionError(ControlError):
    """The peer speaks another protocol version."""


class ViewError(ControlError, ValueError):
    """A peer's cluster view is malformed; it was dropped."""


class MembershipError(P2PKVError):
    """The node can't be a member of the cluster."""


class DuplicateNodeError(MembershipError):
    """A live node has this id already."""


class RegistryError(MembershipError):
    """The store in which members leave their records can't be used."""
