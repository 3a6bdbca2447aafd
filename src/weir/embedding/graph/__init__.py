"""The ONNX graph of a sentence encoder, made from its weights: token ids in, vectors out."""
