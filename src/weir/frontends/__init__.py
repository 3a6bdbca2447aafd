"""The channels, which move bytes between callers and the exchange: HTTP, gRPC and WebSocket; and the dashboard. frontend.py defines what a frontend is."""
