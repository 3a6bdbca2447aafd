"""The server that the tests of the Open Inference Protocol ask, for the routes of it that stand here."""

from tests.protocols.kserve.conftest import address, client, server

__all__ = ["address", "client", "server"]
