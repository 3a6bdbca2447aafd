"""What a call to load a model says, at whichever door it comes in."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any, NamedTuple

from weir.errors import Forbidden, InvalidRequest, brief
from weir.protocols.access import Control
from weir.wire.kserve_json import parse
from weir.wire.values import decode_json

_FILE = "file:"


def is_of_repository(name: str) -> bool:
    """Tell whether a parameter of that name says what the model is, rather than being one of the model's own."""
    return name == "config" or name.startswith(_FILE)


class LoadArguments(NamedTuple):
    """What Manager.load_model takes beside the name: the configuration instead of the repository's, files by path, and the
    parameters of AMD's clients."""

    config: dict[str, Any] | None
    files: dict[str, bytes] | None
    parameters: dict[str, Any]


def load_arguments(parameters: Mapping[str, Any], control: Control, own: Mapping[str, Any]) -> LoadArguments:
    """Read the parameters of a call that loads a model: `config` is a JSON text, `file:<version>/<name>` bytes or base64. `own`
    are those of the model itself, as AMD's clients send them: texts, numbers, true and false.

    Raises InvalidRequest naming parameter, value and rule, and Forbidden for files unless they are allowed.
    """
    config, files = None, {}
    for name, value in own.items():
        if not isinstance(value, (str, int, float)):
            raise InvalidRequest(f"parameter {brief(name)}={brief(value)}: must be a text, a number, true or false")
    for name, value in parameters.items():
        if name == "config":
            config = _config(value)
        elif name.startswith(_FILE):
            files[name.removeprefix(_FILE)] = _content(name, value)
        else:
            raise InvalidRequest(f"parameter {brief(name)}: must be config or file:<version>/<name>")
    if files and not control.settings.allow_model_files:
        raise Forbidden("files in a call that loads a model: not allowed on this server (allow_model_files)")
    if files and config is None:
        raise InvalidRequest(f"parameter {brief(_FILE + next(iter(files)))}: needs the parameter config too")
    return LoadArguments(config, files or None, dict(own))


def _config(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise InvalidRequest(f"parameter 'config'={brief(value)}: must be a JSON object as text")
    config = parse(decode_json, value.encode(), "a configuration")
    if not isinstance(config, dict):
        raise InvalidRequest(f"parameter 'config'={brief(value)}: must be a JSON object as text")
    return config


def _content(name: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise InvalidRequest(f"parameter {brief(name)}: must be base64 ({error})") from None
