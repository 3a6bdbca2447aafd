"""Modules that take long to import and few tests use: `from tests.late import openai`. Each process of the tests imports every file of tests,
and these only once a test uses them."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

HAS_KSERVE = sys.version_info < (3, 14)  # which none of its releases takes
needs_kserve = pytest.mark.skipif(not HAS_KSERVE, reason="there is no kserve for this Python")

if TYPE_CHECKING:
    import av as av
    import check_jsonschema as check_jsonschema
    import kserve as kserve
    import kubernetes as kubernetes
    import kubernetes_validate as kubernetes_validate
    import onnxruntime as onnxruntime
    import openai as openai
    import openapi_spec_validator as openapi_spec_validator
    import schemathesis as schemathesis
    import scipy as scipy
    import tritonclient.http.aio

    triton_aio = tritonclient.http.aio

else:
    _LONGER_NAMES = {"triton_aio": "tritonclient.http.aio"}

    class _Late(ModuleType):
        def __getattr__(self, name: str) -> Any:
            # pytest asks each object of a test file for `__wrapped__` and `_mock_name`.
            if name.startswith("_"):
                raise AttributeError(name)
            module = import_module(self.__name__)
            return getattr(module, name) if hasattr(module, name) else import_module(f"{self.__name__}.{name}")

    def __getattr__(name: str) -> ModuleType:
        return _Late(_LONGER_NAMES.get(name, name))
