"""SGLang calls :func:`register` in each of its processes (entry-point group ``sglang.srt.plugins``).

SGLang has no registry of transfer backends: a list of names for the command line, an enumeration that is closed, and a
function that knows its members. Each of the three is extended in memory; no file of SGLang is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from p2pkv.integrations.sglang import weights

NAME = "p2pkv"
"""What ``--disaggregation-transfer-backend`` takes."""
_UTILS = "sglang.srt.disaggregation.utils"
_CLASSES: Mapping[str, str] = {
    "manager": "P2PKVManager",
    "sender": "P2PKVSender",
    "receiver": "P2PKVReceiver",
    "bootstrap_server": "P2PKVBootstrapServer",
}
"""SGLang's names of the classes that a transfer backend is made of."""


def register() -> None:
    """Make ``p2pkv`` a transfer backend of this process, and have updates of its weights noticed.

    Cheap: the backend is imported when it is chosen.
    """
    import_module("sglang.srt.arg_groups.choices").add_disagg_transfer_backend_choices([NAME])
    _add_member(import_module(_UTILS).TransferBackend)
    hooks = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(f"{_UTILS}.get_kv_class", _get_kv_class, hooks.HookType.AROUND)
    weights.watch(hooks.HookRegistry.register, hooks.HookType.AROUND)


def _add_member(backends: type) -> None:
    """Let ``TransferBackend("p2pkv")`` be something."""
    members = backends.__dict__
    if NAME.upper() in members["_member_map_"]:
        return
    member: Any = object.__new__(backends)
    # what Enum itself sets; __init__ is not called for a member without arguments
    member._name_, member._value_, member.__objclass__ = NAME.upper(), NAME, backends
    members["_member_map_"][NAME.upper()] = member
    members["_value2member_map_"][NAME] = member


def _get_kv_class(original: Callable[..., object], transfer_backend: object, class_type: object) -> object:
    """Answer for our backend, and leave the rest to SGLang."""
    kind = str(getattr(class_type, "value", class_type))
    if getattr(transfer_backend, "value", None) != NAME or kind not in _CLASSES:
        return original(transfer_backend, class_type)
    return getattr(import_module("p2pkv.integrations.sglang.pd.backend"), _CLASSES[kind])
