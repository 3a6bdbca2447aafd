"""Batch jobs: files of requests that run as bulk work, for OpenAI's Batch API and for `weir batch run`."""
