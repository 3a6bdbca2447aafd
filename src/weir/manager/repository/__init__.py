"""Models in a folder: `MODEL/VERSION/FILE`, and `MODEL/config.toml` with what is to be said of them.

document.py   what a model's file says; keys.py: the keys; triton.py: those of Triton and AMD, translated
pbtxt.py      protocol buffers' text form
folder.py     reads a folder; paths.py: names that stay in it; inline_config.py: files that came with a load call
platforms.py  from a version to a class; python_platform.py, onnx_platform.py (onnx_model.py runs in workers)
watching.py   loads what has changed
"""
