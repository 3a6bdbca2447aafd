"""The channels that move bytes between callers and the exchange: HTTP, gRPC, WebSocket and the dashboard; what a frontend is says frontend.py."""
