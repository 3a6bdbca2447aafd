"""The channels that move bytes between callers and the exchange: HTTP, gRPC, WebSocket and the dashboard; frontend.py defines what a frontend is."""
